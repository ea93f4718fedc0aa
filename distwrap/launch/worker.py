"""The one way into a rank, whoever started it: take the assignment, meet the others, run the call, report."""

import ctypes
import faulthandler
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import nn

from distwrap import retrofit
from distwrap._internals.python import run_interpreter_end
from distwrap.environments import Placement, distwrap_environment
from distwrap.errors import WorkerError, WorkerTimeoutError
from distwrap.group import failures
from distwrap.group.collectives import gather_object
from distwrap.group.setup import abandon_process_group, announce, finish_process_group, join, teardown_process_group
from distwrap.group.world import active_world, current_world
from distwrap.launch import transport
from distwrap.launch.callers_models import given_models, say_what_stays
from distwrap.launch.outcome import CleanExit, Outcome, OutcomeFolder, failure, success
from distwrap.launch.task import Assignment, Task
from distwrap.model.checks import diagnosis
from distwrap.model.checks.optimizers import Optimizers
from distwrap.network.rendezvous import count_meetings_anew
from distwrap.registry import strategies
from distwrap.retrofit import Retrofitted
from distwrap.seeding import seed_everything
from distwrap.standard_input import leave_to_rank_zero
from distwrap.supervision.failure import Failure

T = TypeVar("T")

_LOST_SECONDS = 10.0  # in which a process that is being ended is gone
_is_lost = threading.Event()

importing_main = False  # while the script is imported in a rank, a decorated call there is a missing main guard


class LauncherLink(Protocol):
    """A rank's end of the link to its launcher.

    A launcher whose ranks are another program's children brings a link of its own; `PipeLink` is that of ours.
    """

    def bind_lifetime(self) -> None:
        """Prepare this process as a rank, first of all: tie its life to the launcher's, where nobody else does."""

    def assignment(self) -> Assignment:
        """Wait for this rank's instructions.

        Raises:
            EOFError: the launcher is gone.
        """

    def report(self, outcome: Outcome) -> None:
        """Send the outcome of this rank to the launcher; called once, perhaps not in the main thread."""


class PipeLink:
    """The link of a rank that is a process of this node's, and whose launcher holds the other end of a pipe."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def bind_lifetime(self) -> None:
        bind_to_parent()
        # The launcher takes its end for the end of the rank: nothing that the rank starts may hold it too.
        os.register_at_fork(after_in_child=self._conn.close)
        os.set_inheritable(self._conn.fileno(), False)

    def assignment(self) -> Assignment:
        assignment: Assignment = pickle.loads(self._conn.recv_bytes())
        leave_to_rank_zero(assignment.placement.rank)
        return assignment

    def report(self, outcome: Outcome) -> None:
        with suppress(BrokenPipeError):  # the launcher is gone, and nobody is left to tell
            self._conn.send(outcome)


class FolderLink:
    """The link of a rank that another program has started: its outcome is a file in a folder of the launch.

    Args:
        folder: the folder.
        assignment: returns this rank's instructions.
        is_child: whether this process's life is to end with its parent's.
    """

    def __init__(self, folder: OutcomeFolder, assignment: Callable[[], Assignment], *, is_child: bool = True) -> None:
        self._folder, self._assignment, self._is_child = folder, assignment, is_child
        self._placement: Placement | None = None

    def bind_lifetime(self) -> None:
        if self._is_child:
            bind_to_parent()

    def assignment(self) -> Assignment:
        assignment = self._assignment()
        self._placement = assignment.placement
        return assignment

    def report(self, outcome: Outcome) -> None:
        self._folder.put(outcome, self._placement)


def bind_to_parent() -> None:
    """Tie this process's life to its parent's, and make it stoppable together with all that it starts."""
    if sys.platform == "linux":  # the kernel then kills it also where it is stuck in native code
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getpgrp() != os.getpid():
        os.setsid()  # a Ctrl-C reaches the caller alone


def rank_main(conn: Connection, task: Task | None = None) -> NoReturn:
    """Be a rank for the rest of this process's life, given the far end of the launcher's connection; see `work`."""
    leave(work(PipeLink(conn), task, finish=finish_process_group))


def work(link: LauncherLink, task: Task | None = None, *, finish: Callable[[], None] = teardown_process_group) -> int:
    """Be a rank: take the assignment, run the call, and report the outcome.

    Args:
        link: this rank's link to its launcher.
        task: what to run, where this process is a fork of the caller and has it.
        finish: leaves the process group after success.

    Returns:
        The exit code for this process.
    """
    link.bind_lifetime()
    make_output_readable()
    count_meetings_anew()
    try:
        assignment = link.assignment()
    except (EOFError, OSError):
        return 1  # the launcher is gone, and nobody is left to tell
    rank = assignment.placement.rank
    try:
        value = report_failures(link, rank, lambda: _run(assignment, task, link))
    except FailureReported:
        return 1
    link.report(success(rank, value))  # before the goodbye: who waits for us in vain can be told of our end
    _say_from_now_on()
    finish()
    return 0


def _say_from_now_on() -> None:
    """Let the side channel print why this process ends, now that its launcher hears no more of it."""
    world = active_world()
    if world is not None and world.channel is not None:
        world.channel.on_stall = world.channel.failures.on_loss = None


def _run(assignment: Assignment, task: Task | None, link: LauncherLink) -> bytes | None:
    """Return the pickled part of the run that the caller wants."""
    if assignment.context is not None:
        assignment.context.restore()
    if assignment.random is not None:
        assignment.random.restore()
    use_threads(assignment)  # before the user's modules, which may choose another number
    place = assignment.placement
    if assignment.store:
        os.environ.update(distwrap_environment.variables(place, assignment.launcher, assignment.store))
    if assignment.main_module is not None:
        _import_main(runpy.run_module, assignment.main_module, alter_sys=True)
    elif assignment.main_path is not None:
        _import_main(runpy.run_path, assignment.main_path)
    if task is None:
        assert assignment.payload is not None
        task = transport.unpack(assignment.payload)
    if assignment.context is not None:
        assignment.context.settings.restore()  # after all imports, as the caller may have made them
        if assignment.context.accelerator is not None:
            assignment.context.accelerator.learn()
    given = given_models(task)
    value, trained = take_part(
        assignment, task, lambda report: stalled(report, link, place.rank), lambda first: _lost(first, link, place.rank)
    )
    say_what_stays(task, given, value)
    return packed(assignment, task, value, trained)


def use_threads(assignment: Assignment) -> None:
    """Compute with as many threads as the launcher gives this rank."""
    if assignment.threads is not None:
        torch.set_num_threads(assignment.threads)


def take_part(
    assignment: Assignment,
    task: Task,
    on_stall: Callable[[str], None],
    on_loss: Callable[[Failure], None] | None = None,
) -> tuple[Any, list[Retrofitted]]:
    """Join the other ranks and run the call.

    Args:
        assignment: this rank's instructions.
        task: what to run.
        on_stall: called with a report when no rank moves any more.
        on_loss: called when this process is about to be ended, since another rank has failed.

    Returns:
        The function's value, or the list of all ranks' where they gather them; and what was retrofitted.
    """
    strategy = strategies.make(task.options.strategy)
    world = strategy.join(assignment.placement, task.options, assignment.secret)
    if world is None:
        world = join(assignment.placement, task.options, inherited=assignment.secret)
    announce(world, assignment.launcher)
    if world.channel is not None:
        world.channel.on_stall, world.channel.failures.on_loss = on_stall, on_loss
    if world.tells_others:
        world.part(Optimizers)
    with reported(task):
        try:
            value, trained = execute(task)
        except SystemExit as error:
            if failures.is_failure(error):
                raise
            world.wait()
            value, trained = CleanExit(), []  # the others go on; whoever waits for this rank learns that it has left
    world.conclude()
    return (gather_object(value) if assignment.returns == "gathered" else value), trained


def reported(task: Task) -> AbstractContextManager[None]:
    """Report where the time of a run goes, if its options ask for it; the ``with`` holds the run."""
    if not task.options.report:
        return nullcontext()
    from distwrap.timing.report import report_of_run  # which most runs do not need

    return report_of_run(task.options.report)


def packed(assignment: Assignment, task: Task, value: Any, trained: list[Retrofitted]) -> bytes | None:
    """Pickle what the caller wants of this rank: its value, and from the first rank of a node what it has trained."""
    place = assignment.placement
    wanted = place.rank == 0 or assignment.returns == "all"
    if not wanted and place.local_rank > 0:
        return None
    states = [item.state() for item in trained] if place.local_rank == 0 else []
    return transport.pack_result(
        (value if wanted else None, states),
        f"what {task.name} returned on rank {place.rank}",
        [(item.original, item.wrapped) for item in trained],
    )


class FailureReported(Exception):
    """Failure of this rank of which its launcher already knows."""


def report_failures(link: LauncherLink, rank: int, call: Callable[[], T]) -> T:
    """Return what the call returns; if it fails, report the failure, and forget the process group.

    Raises:
        FailureReported: it has failed, also with SystemExit or KeyboardInterrupt.
    """
    first: BaseException | None = None
    try:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001
            first = error
            _tell(link, rank, first)
    except RuntimeError as error:  # torch's handler for loader workers, before `_tell` could switch it off
        _tell(link, rank, first or error)
    raise FailureReported


def _tell(link: LauncherLink, rank: int, error: BaseException) -> None:
    if _is_lost.is_set():
        time.sleep(_LOST_SECONDS)  # what fails as this process is ended explains nothing
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises wherever it is as a loader's worker ends
    told = failures.explained(error)
    report = failure(rank, told)
    ends_ranks = distwrap_environment.STORE in os.environ  # soon after a report: what is being written comes first
    if not ends_ranks:
        link.report(report)  # first: torch's agent ends this rank when others end that have heard of the failure
        failures.tell(told)
    abandon_process_group(failed=failures.is_failure(error))
    if ends_ranks:
        link.report(report)


def _lost(first: Failure, link: LauncherLink, rank: int) -> None:
    """Report that this process ends because another rank has failed; called in the side channel's thread."""
    _is_lost.set()
    words = f"rank {rank} was ended, since another failed first: {first}"
    link.report(failure(rank, WorkerError(words, rank=rank, secondary=True)))


def stalled(report: str, link: LauncherLink, rank: int) -> NoReturn:
    """Report, from the side channel's thread, that no rank moves, and end this process."""
    link.report(failure(rank, WorkerTimeoutError(report, rank=rank, host=socket.gethostname())))
    os._exit(1)


def leave(code: int) -> NoReturn:
    """End a rank's process as the interpreter would, with threads, exit handlers and buffers, but for its clean-up.

    The interpreter's own end takes longer, and while gloo's threads run it aborts now and then.
    """
    done = True
    try:
        done = run_interpreter_end()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if done:
            os._exit(code)
    sys.exit(code)


def make_output_readable() -> None:
    """Write whole lines, and in a crash of native code the Python stacks."""
    faulthandler.enable(2)  # sys.stderr may be no file, as in a notebook or under pytest
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., Any] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # Whole lines, also under PYTHONUNBUFFERED: the ranks write to the same place.
            reconfigure(line_buffering=True, write_through=False)


def _import_main(run: Callable[..., dict[str, Any]], script: str, **how: bool) -> None:
    """Import the caller's script under another name, as multiprocessing does, so that references to it resolve."""
    global importing_main
    importing_main = True
    try:
        module = types.ModuleType("__mp_main__")
        module.__dict__.update(run(script, run_name="__mp_main__", **how))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    finally:
        importing_main = False


def execute(task: Task) -> tuple[Any, list[Retrofitted]]:
    """Return the function's value, and what was retrofitted."""
    if task.options.seed is not None:
        seed_everything(task.options.seed)
    try:
        result = _retrofitted(task) if task.options.retrofit else (task.function(*task.args, **task.kwargs), [])
    except RuntimeError as error:
        raise diagnosis.explained(error)  # noqa: B904 - which knows its cause
    current_world().wait()  # not settle: it may be a call inside another, which goes on
    return result


def _retrofitted(task: Task) -> tuple[Any, list[Retrofitted]]:
    from distwrap.comm import consolidate  # with all algorithms, which most runs do not need

    function, args, kwargs, found = retrofit.wrap(task.function, task.args, task.kwargs)
    try:
        value = function(*args, **kwargs)
    finally:
        retrofit.take_back(task.function, task.args, task.kwargs, found)
    for item in found:
        if isinstance(item.original, nn.Module):
            consolidate(item.wrapped)  # the caller gets one model, not rank 0's of several
    for item in found:
        item.finish()
    return value, found
