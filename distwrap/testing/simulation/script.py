"""Run a script that torchrun could start on simulated ranks, each with a ``__main__`` and modules of its own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

from distwrap._internals.torch_devices import OneDevice, answered_for_ranks
from distwrap.environments import Placement, distwrap_environment, torchrun
from distwrap.errors import OptionError
from distwrap.group.setup import import_before_group
from distwrap.seeding import seed_generators
from distwrap.supervision.stacks import is_users
from distwrap.testing.simulation.simulation import Simulation

_PORT = "29500"


def failure_of(path: str, ranks: int, arguments: Sequence[str], *, schedule: int | None = None) -> str:
    """Run a script on simulated ranks, and return in words why it has failed: a rank did, or none can go on.

    Args:
        path: the script's.
        ranks: their number.
        arguments: of the script.
        schedule: a number that draws another order of the ranks' turns.

    Raises:
        OptionError: there is no such script.
    """
    script = Path(path).resolve()
    if not script.is_file():
        raise OptionError(f"there is no script {path}")
    simulation = Simulation(ranks, schedule)
    mode = OneDevice(simulation.device)

    def variables(place: Placement) -> dict[str, str]:
        own = distwrap_environment.variables(place, "simulate", "")
        del own[distwrap_environment.STORE]  # by which a rank is known as ours, where it is to be torchrun's
        return {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT, torchrun.AGENT: "simulated"}

    def body(place: Placement) -> None:
        own = vars(sys.modules["__main__"])
        own["__file__"] = str(script)
        # torch's own generator begins alike in every process.
        seed_generators(hash((schedule or 0, place.rank)) % 2**31, frozenset({"random", "numpy"}))
        try:
            with mode:  # torch.compile keeps what it makes with the code, which is compiled for each rank
                exec(compile(script.read_bytes(), str(script), "exec"), own)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise

    with (
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        mock.patch.object(sys, "argv", [path, *arguments]),
        answered_for_ranks(is_users, ranks, simulation.rank, mode),
    ):
        import_before_group()
        more = f"; every device is {simulation.device}"
        simulation.run(body, variables, lambda: {"__main__": ModuleType("__main__")}, more, first_here=True)
    sys.stdout.flush()  # what the ranks have printed comes first
    cause, failed = simulation.scheduler.failure, simulation.scheduler.failed
    if cause is None or failed is None:
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # Ctrl-C
        return str(cause or "")
    if isinstance(cause, SystemExit):
        return f"rank {failed.rank.number} called sys.exit({cause.code!r})"
    trace = cause.__traceback__
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):  # our frames, around the script
        trace = trace.tb_next
    return f"rank {failed.rank.number} raised:\n{''.join(traceback.format_exception(type(cause), cause, trace))}"
