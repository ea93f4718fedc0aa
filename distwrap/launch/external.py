"""``launcher="external"``: ranks that an outer launcher must have started already."""

from typing import NoReturn

from distwrap.errors import LaunchError


def refuse() -> NoReturn:
    """Refuse to launch: a launcher is made only where no outer launcher has started this process.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(
        "launcher='external' needs ranks that another launcher has started, and none has started this process. "
        "Start the script with `torchrun --nproc-per-node=2 train.py`, or choose launcher='auto'."
    )
