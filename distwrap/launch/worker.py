"""The only way into a rank's process, whoever started it: take the assignment, meet the others, run, report."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from distwrap._internals.python import run_interpreter_end
from distwrap.environments import Placement, distwrap_environment
from distwrap.errors import WorkerTimeoutError
from distwrap.group import failures
from distwrap.group.collectives import gather_object
from distwrap.group.setup import abandon_process_group, announce, finish_process_group, join
from distwrap.group.world import RunOptions
from distwrap.launch import execute, pickling, transport
from distwrap.launch.execute import Call
from distwrap.launch.outcome import failure, success
from distwrap.network.rendezvous import count_meetings_anew
from distwrap.seeding import RandomState


@dataclass(frozen=True)
class Surroundings:
    """What a fresh process must share with the caller to run its function as the caller would."""

    environ: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    umask: int
    random: RandomState

    @classmethod
    def capture(cls) -> Surroundings:
        """Read them off this process."""
        umask = os.umask(0)
        os.umask(umask)
        return cls(dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), umask, RandomState.capture())

    def restore(self) -> None:
        """Make this process like the one they were read off."""
        if dict(os.environ) != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.umask(self.umask)
        self.random.restore()


Wanted = Literal["own", "trained", ""]


@dataclass(frozen=True)
class Assignment:
    """What a rank is told.

    Attributes:
        store: the file in which the ranks meet.
        everybody: whether the ranks bring their values together themselves.
        surroundings: ``None`` for a fork, which has them.
        threads: how many to compute with; ``None`` leaves it to the user's variables.
        value: what of this rank's is wanted: its value and what it trained, only what it trained, or nothing.
        main_path: the script to import first, where functions go by reference and one lives there.
        payload: the pickled call; ``None`` for a fork, which has it.
    """

    placement: Placement
    launcher: str
    store: str
    run: RunOptions
    threads: int | None
    value: Wanted = ""
    everybody: bool = False
    surroundings: Surroundings | None = None
    main_path: str | None = None
    payload: bytes | None = None


importing_main = False  # while the script is imported in a rank, a decorated call there is a missing main guard


def work(conn: Connection, call: Call | None = None) -> int:
    """Be a rank: read the assignment from `conn`, run the call, write an `Outcome`, and return the exit code."""
    become_a_rank(conn)
    count_meetings_anew()
    if call is not None:
        pickling.mark_as_forked()
    try:
        assignment: Assignment = pickle.loads(conn.recv_bytes())
    except (EOFError, OSError):
        return 1  # the caller is gone, and nobody is left to tell
    rank = assignment.placement.rank
    try:
        value = _run(assignment, call, conn)
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are told to the caller too
        tell_failure(conn, rank, error)
        return 1
    conn.send(success(rank, value))  # before the goodbye: who waits for us in vain can be told that we are done
    finish_process_group()
    return 0


def tell_failure(conn: Connection, rank: int, error: BaseException) -> None:
    """Report a failure of this rank to the caller, and forget the process group."""
    try:
        _tell(conn, rank, error)
    except RuntimeError:  # see below: it may have come before it could be kept away
        _tell(conn, rank, error)


def _tell(conn: Connection, rank: int, error: BaseException) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises wherever we are when a loader's worker ends
    report = failure(rank, failures.explained(error))
    abandon_process_group()
    conn.send(report)


def leave(code: int) -> None:
    """End a rank's process as the interpreter would, with threads, exit handlers and buffers, but for its clean-up.

    The interpreter's own end takes longer, and while gloo's threads run it aborts now and then.
    """
    ended = True
    try:
        ended = run_interpreter_end()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if ended:
            os._exit(code)
    sys.exit(code)


def spawned(fd: int) -> None:
    """Be a rank in a fresh interpreter."""
    leave(work(Connection(fd)))


def _run(assignment: Assignment, call: Call | None, conn: Connection) -> bytes | None:
    prepare(assignment)
    os.environ.update(distwrap_environment.variables(assignment.placement, assignment.launcher, assignment.store))
    return run(assignment, call, on_stall=lambda report: stalled(report, conn, assignment.placement.rank))


def prepare(assignment: Assignment, keep: tuple[str, ...] = ()) -> None:
    """Make this process like the caller's, but for variables that begin with one of those to keep."""
    if assignment.surroundings is not None:
        kept = {name: value for name, value in os.environ.items() if name.startswith(keep)} if keep else {}
        assignment.surroundings.restore()
        os.environ.update(kept)
    if assignment.threads is not None:
        torch.set_num_threads(assignment.threads)


def run(assignment: Assignment, call: Call | None, on_stall: Callable[[str], None] | None = None) -> bytes | None:
    """Join the others, run the call, and return what of it is wanted at home, pickled.

    Args:
        assignment: what to do.
        call: what to run, where this process is a fork and has it.
        on_stall: told when no rank moves any more.
    """
    if assignment.main_path is not None:
        _import_main(assignment.main_path)
    if call is None:
        assert assignment.payload is not None
        call = Call(*transport.unpack(assignment.payload))
    run = assignment.run
    world = join(assignment.placement, run)
    announce(world, assignment.launcher)
    assert world.channel is not None
    if on_stall is not None:
        world.channel.on_stall = on_stall
    value, trained = execute.execute(call, run)
    if assignment.everybody:
        value = gather_object(value)
    data = None
    if assignment.value:
        states = [item.state() for item in trained] if world.placement.local_rank == 0 else []
        value = None if assignment.value == "trained" else value
        what = f"what {call.name} returned on rank {world.placement.rank}"
        known = [(item.original, item.wrapped) for item in trained]
        data = transport.pack_result((value, states), what, known)
    return data


def stalled(report: str, conn: Connection, rank: int) -> None:
    """Tell the caller, from the side channel's thread, since the main thread does not move."""
    conn.send(failure(rank, WorkerTimeoutError(report, rank=rank, host=socket.gethostname())))
    os._exit(1)


def _import_main(path: str) -> None:
    """Import the caller's script under another name, as multiprocessing does, so that references to it resolve."""
    global importing_main
    import runpy
    import types

    importing_main = True
    try:
        module = types.ModuleType("__mp_main__")
        module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    finally:
        importing_main = False


def become_a_rank(conn: Connection) -> None:
    """Be a rank whose caller holds the other end of `conn`."""
    stand_alone()
    os.register_at_fork(after_in_child=conn.close)  # the caller takes the end of `conn` for the end of the rank


def stand_alone() -> None:
    """Tie this process's life to its parent's, and make it stoppable as a whole."""
    _die_with_parent()
    if os.getpgrp() != os.getpid():
        os.setsid()  # a Ctrl-C reaches the caller alone, and a whole rank can be stopped at once
    faulthandler.enable(2)  # sys.stderr may be no file, as in a notebook or under pytest
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., Any] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # Whole lines, also under PYTHONUNBUFFERED: the ranks write to the same place.
            reconfigure(line_buffering=True, write_through=False)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, also when it is stuck in native code (Linux)."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
