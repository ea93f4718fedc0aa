"""Run a script that torchrun could start on simulated ranks, each with a ``__main__`` and modules of its own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from distwrap._internals.torch_devices import OneDevice, answered_for_ranks
from distwrap.environments import distwrap_environment, torchrun
from distwrap.errors import OptionError
from distwrap.group.setup import import_before_group
from distwrap.options import QUIET, switched_on
from distwrap.seeding import seed_generators
from distwrap.supervision.stacks import is_users
from distwrap.testing.simulation.process_state import ProcessState
from distwrap.testing.simulation.scheduler import Cancelled
from distwrap.testing.simulation.simulation import Simulation
from distwrap.wording import print_notice

_PORT = "29500"


def run_script(path: str, ranks: int, arguments: Sequence[str], *, schedule: int | None = None) -> int:
    """Run a script on simulated ranks, and return the exit code: 1 if a rank has failed, or none can go on.

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
    try:
        # torch.compile keeps what it makes with the code, and it belongs to one rank's globals.
        codes = [compile(script.read_bytes(), str(script), "exec") for _ in range(ranks)]
    except SyntaxError as error:
        raise OptionError(f"{path}: {error}") from error
    simulation = Simulation(ranks, schedule)
    failed: list[str] = []
    mode = OneDevice(simulation.device)
    bodies = [_rank(simulation, rank, code, mode, failed, schedule or 0) for rank, code in enumerate(codes)]
    if not switched_on(os.environ, QUIET):
        print_notice(
            f"{ranks} simulated ranks, threads of this process that take turns; every device is {simulation.device}"
        )
    paths, argv = list(sys.path), sys.argv
    sys.path.insert(0, str(script.parent))
    sys.argv = [path, *arguments]
    states = [
        ProcessState(_variables(rank, ranks), owns_modules=True, modules={"__main__": ModuleType("__main__")})
        for rank in range(ranks)
    ]
    try:
        with answered_for_ranks(is_users, ranks, simulation.rank, mode, simulation.device):
            import_before_group()
            simulation.run(bodies, states, first_here=True)
    finally:
        sys.path[:], sys.argv = paths, argv
    sys.stdout.flush()  # what the ranks have printed comes first
    for words in failed[:1]:
        print(words, file=sys.stderr)
    if simulation.scheduler.failure is not None and not failed:
        print(f"distwrap: {simulation.scheduler.failure}", file=sys.stderr)
    return int(simulation.scheduler.failure is not None)


def _variables(rank: int, ranks: int) -> dict[str, str]:
    place = distwrap_environment.on_one_node(rank, ranks)
    own = distwrap_environment.variables(place, "simulate", "")
    del own[distwrap_environment.STORE]  # by which a rank is known as ours, where it is to be torchrun's
    return {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT, torchrun.AGENT: "simulated"}


def _rank(
    simulation: Simulation, rank: int, code: CodeType, mode: OneDevice, failed: list[str], schedule: int
) -> Callable[[], None]:
    def tell(error: BaseException, words: str) -> None:
        if simulation.scheduler.failure is None:  # else this only follows from it
            failed.append(words)
        simulation.scheduler.fail(error)

    def body() -> None:
        main = sys.modules["__main__"]
        main.__file__ = code.co_filename
        # torch's own generator begins alike in every process.
        seed_generators(hash((schedule, rank)) % 2**31, frozenset({"random", "numpy"}))
        try:
            with mode:
                exec(code, vars(main))
        except Cancelled:
            raise
        except SystemExit as error:
            if error.code not in (None, 0):
                tell(error, f"distwrap: rank {rank} called sys.exit({error.code!r})")
        except BaseException as error:  # noqa: BLE001 - told as Python tells it at the end of a script
            trace = _without_ours(error.__traceback__)
            words = "".join(traceback.format_exception(type(error), error, trace))
            tell(error, f"distwrap: rank {rank} raised:\n{words}")

    return body


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    return trace.tb_next if trace is not None else None
