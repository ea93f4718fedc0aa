"""A debugger on one rank, while the others wait for it as long as it takes."""

import inspect
import os
from contextlib import ExitStack
from typing import TextIO

from distwrap.errors import OptionError, PlacementError
from distwrap.group.wait_for_rank import share_result
from distwrap.group.world import current_world
from distwrap.simulated import simulation
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity
from distwrap.wording import print_notice


def breakpoint_on(rank: int = 0) -> None:
    """Stop here, and give the terminal to the debugger (pdb) of one rank, while the others wait without a timeout.

    Every rank must call it. The others go on when the debugger is told to ``continue``; until then do not run anything
    in it that needs them, as a collective. In a single process it is Python's `breakpoint`.

    Args:
        rank: the rank to debug.

    Raises:
        OptionError: there is no such rank.
        PlacementError: there is no terminal.
        WorkerDiedError: that rank died; raised on the others.
    """
    import pdb  # together with half a dozen modules, which a run without a debugger does not need

    world = current_world()
    if not 0 <= rank < world.placement.world_size:
        raise OptionError(f"breakpoint_on({rank}): ranks are 0 to {world.placement.world_size - 1}.")
    here = inspect.currentframe()
    frame = here.f_back if here is not None else None
    name = f"breakpoint_on({rank})"
    if world.placement.world_size == 1:
        pdb.Pdb().set_trace(frame)
        return
    if world.placement.rank != rank:
        share_result(name, rank, None)
        return
    stdin, stdout = _terminal()
    waiting = ExitStack()
    waiting.enter_context(world.part(Activity).waiting("debugger", timed=False))

    class Debugger(pdb.Pdb):
        """A debugger that lets the other ranks go on when it is left for the first time."""

        left = False

        def set_continue(self) -> None:
            super().set_continue()
            self.leave()

        def set_quit(self) -> None:
            super().set_quit()
            self.leave()

        def leave(self) -> None:
            if not self.left:
                self.left = True
                waiting.close()
                share_result(name, rank, b"on")

    print(f"distwrap: rank {rank} stops, and the others wait until you say 'continue'", file=stdout, flush=True)
    Debugger(stdin=stdin, stdout=stdout, nosigint=True).set_trace(frame)


def where() -> None:
    """Print on standard error the line in which each rank is: in a debugger, or anywhere in the loop.

    Among simulated ranks, of which one runs, it also says for what each of the others waits.

    Example:
        >>> where()
    """
    simulated, world = simulation(), current_world()
    if simulated is not None:
        lines = simulated.scheduler.whereabouts()
    elif world.tells_others and world.channel is not None:
        lines = world.channel.reporter.ask_all()
    else:
        lines = "rank 0 is at {1}".format(*stacks.locate(stacks.of_frame(stacks.users_frame())))
    print_notice(f"where each rank is:\n{lines}")


def _terminal() -> tuple[TextIO, TextIO]:
    """Open the terminal, which is standard input's even where this process is in a session of its own."""
    for path in ["/dev/tty", *(os.ttyname(fd) for fd in (0, 1, 2) if os.isatty(fd))]:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
        except OSError:
            continue
        return open(fd, closefd=False), open(fd, "w", closefd=False)
    raise PlacementError(
        f"breakpoint_on() finds no terminal on rank {current_world().placement.rank}: in a notebook or a batch job run "
        f"with nprocs=1, and use breakpoint()."
    )
