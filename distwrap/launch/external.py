"""``launcher="external"``: ranks that an outer launcher must have started already."""

from distwrap.errors import LaunchError
from distwrap.launch.base import Launcher


class ExternalLauncher(Launcher):
    """None at all: where this is made, no outer launcher has started this process.

    Raises:
        LaunchError: always.
    """

    name = "external"

    def __init__(self) -> None:
        raise LaunchError(
            "launcher='external' waits for an outer launcher, and none has started this process. Start the script "
            "with `torchrun --nproc-per-node=2 train.py`, or choose launcher='auto'."
        )
