"""``launcher="script"``: this process is rank 0, and the other ranks run the same command line again.

Nothing is pickled. Each of the other ranks runs the script from its top, reaches the decorated call, joins, and parks
at the call's end: if rank 0 makes another decorated call, they take rank 0's result of the last one and run on to it;
else they leave when rank 0 does. What they do is in `distwrap.launch.script_rank`.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Pipe
from types import FrameType
from typing import Any

import torch

from distwrap import retrofit
from distwrap.data import workers
from distwrap.environments import distwrap_environment
from distwrap.environments.variables import variables_set
from distwrap.errors import LaunchError, WorkerTimeoutError
from distwrap.group import failures
from distwrap.group.setup import abandon_process_group, teardown_process_group
from distwrap.launch import command_line, script_rank, store_file, transport
from distwrap.launch.base import Job, Launcher
from distwrap.launch.logs import Logs, redirected
from distwrap.launch.outcome import Outcome, failure, success
from distwrap.launch.processes import CommandProcess, Process
from distwrap.launch.signals import hear_interrupts
from distwrap.launch.supervisor import CAUSE_SECONDS, INTERRUPT_SECONDS, print_where_all_are, stop, supervise
from distwrap.launch.task import Assignment
from distwrap.launch.worker import take_part, use_threads
from distwrap.network.rendezvous import next_meeting

_LEAVE_SECONDS = 5.0  # for the other ranks' exit handlers


class ScriptLauncher(Launcher):
    """The command line again for the other ranks; this process is rank 0."""

    name = "script"
    writes_logs = True

    def check(self, job: Job) -> None:
        name = job.task.name
        if script_rank.is_one():
            asked = job.task.options.launcher
            if asked != "script":
                raise LaunchError(
                    f"{name} has launcher={asked!r} in a script whose other calls have launcher='script', so "
                    f"each of its ranks would launch ranks of its own. Use the same launcher for all calls in a script."
                )
            return
        if _ranks.failed:
            raise LaunchError(
                f"{_ranks.failed} has failed before, and with launcher='script' the other ranks, which run the script "
                f"from its top, cannot come to {name} again. Use launcher='forkserver' to go on after a failure."
            )
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("launcher='script' runs rank 0 in the caller, so the call must be in the main thread.")
        if _ranks.parked and len(_ranks.parked) != job.nprocs - 1:
            raise LaunchError(
                f"launcher='script' has {len(_ranks.parked) + 1} ranks from the first decorated call, and this one "
                f"asks for {job.nprocs}. Ask for the same number in all calls, or use launcher='forkserver'."
            )
        if not _ranks.parked:
            command_line.command(0)  # or there is none that could run again

    def plan(self, job: Job) -> Assignment:
        return self.plan_in_place(job)

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        if script_rank.is_one():
            self._value = script_rank.run(job, plan)
            return []
        return self._run_rank_zero(job, plan)

    def bring_home(self, job: Job, outcomes: Any) -> Any:
        if job.returns == "rank0" or script_rank.is_one():
            return self._value
        return [self._value, *(transport.unpack_result(o.value) for o in outcomes if o.value is not None)]

    def _run_rank_zero(self, job: Job, plan: Assignment) -> list[Outcome]:
        # One store for all calls of this process: the parked ranks still hold it when the next call begins.
        met = store_file.on_one_node(_ranks.store or _store_until_exit(), job.nprocs)
        met = replace(met, number=next_meeting())
        _wake_or_start(job, met, plan)
        plan = replace(plan, placement=met.placement(0), store=met.store)
        zero = _RankZero()
        watch = _Watch(zero, list(_ranks.parked), met)
        with (
            variables_set(distwrap_environment.variables(plan.placement, self.name, met.store)),
            ExitStack() as stack,
            redirected(_ranks.logs.streams(0)),
            hear_interrupts(watch.interrupt, lambda: print_where_all_are(met)),
            zero.hear_of_failures(),
        ):
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            watch.start()
            try:
                use_threads(plan)
                with zero.working():
                    value, found = take_part(plan, job.task, zero.stalled)
                self._value = _ranks.last_value = retrofit.unwrapped(value, found)
                zero.report(success(0, None))
                teardown_process_group()
                return watch.outcomes()
            except BaseException as error:
                zero.leave()  # the interruption may have come in the way of that
                _ranks.failed = job.task.name
                try:
                    cause = watch.cause_of(error)
                finally:
                    _end(watch)
                if cause is error:
                    raise
                raise cause from cause.__cause__


@dataclass
class _Ranks:
    """The other ranks of this process's script, which stay from call to call.

    Attributes:
        parked: their processes.
        store: where all ranks meet.
        last_value: what the last decorated call returned.
        failed: the name of the call that has failed, after which there is no other.
        logs: of what all ranks print.
    """

    parked: list[CommandProcess] = field(default_factory=list)
    store: str = ""
    last_value: Any = None
    failed: str = ""
    logs: Logs = field(default_factory=lambda: Logs(None, ()))


_ranks = _Ranks()


def _store_until_exit() -> str:
    stack = ExitStack()
    _ranks.store = stack.enter_context(store_file.place())
    atexit.register(stack.close)
    return _ranks.store


def _wake_or_start(job: Job, met: store_file.Meeting, plan: Assignment) -> None:
    """Let the parked ranks run on to this call, or start them."""
    if _ranks.parked:
        data = transport.pack_result(_ranks.last_value, "what the last decorated call returned")
        for process in _ranks.parked:
            _send(process, data)
    else:
        _ranks.logs = Logs(job.task.options.log_dir, met.ranks)
        atexit.register(_let_the_parked_leave)
        try:
            for rank in met.ranks[1:]:
                env = {**os.environ, **distwrap_environment.variables(met.placement(rank), "script", met.store)}
                _ranks.parked.append(_start(rank, command_line.command(rank), env))
        except BaseException:
            stop(_ranks.parked, all_they_started=True)
            _ranks.parked.clear()
            _ranks.logs.close()
            raise
        _ranks.logs.start(keep=1)
    for process in _ranks.parked:
        _send(process, (met.store, job.task.name, plan.secret))


def _send(process: CommandProcess, message: Any) -> None:
    with suppress(OSError):  # it is gone, of which the supervisor tells
        process.conn.send(message)


def _start(rank: int, command: list[str], env: dict[str, str]) -> CommandProcess:
    def with_descriptor(fd: int) -> list[str]:
        env[distwrap_environment.SCRIPT] = str(fd)
        return command

    return CommandProcess(rank, with_descriptor, env, command_line.directory(), _ranks.logs.streams(rank))


def _end(watch: _Watch) -> None:
    """After a failure: stop the others, so that nobody is left who could keep the teardown waiting."""
    try:
        with suppress(KeyboardInterrupt):  # the failure itself is on its way, and nobody is left
            stop(_ranks.parked, all_they_started=True, interrupt=watch.interrupted)
    finally:
        _ranks.parked.clear()
        workers.remove_what_is_left()
        abandon_process_group(destroy=True)


def _let_the_parked_leave() -> None:
    """Wait, at the end of this process, for the others' own exit handlers: they would be killed with it."""
    for process in _ranks.parked:
        process.close()
    if any(process.exitcode(_LEAVE_SECONDS) is None for process in _ranks.parked):
        stop(_ranks.parked)
    _ranks.parked.clear()
    workers.remove_what_is_left()
    _ranks.logs.close()


class _AnotherFailed(BaseException):
    """Interruption of rank 0's function, since another rank has failed, or none moves; never seen outside."""


class _RankZero(Process):
    """This process as a rank like the others, which the supervisor waits for and ends.

    Its function runs in the main thread. What ends it is an exception out of a signal's handler, which wakes the thread
    from a sleep or a read as well. The signal is one that does nothing without our handler, and the handler does
    nothing outside of the function: so it is never taken for a Ctrl-C, and never comes late.
    """

    _SIGNAL = signal.SIGURG

    def __init__(self) -> None:
        self.rank, self.pid = 0, os.getpid()
        self.conn, self._word = Pipe(duplex=False)
        self._reporting = threading.Lock()
        self._outcome: Outcome | None = None
        self.has_left = threading.Event()
        self._in_function = self._is_called = False

    @contextmanager
    def hear_of_failures(self) -> Iterator[None]:
        """Install the handler for the time of a ``with``."""
        before = signal.signal(self._SIGNAL, self._leave_function)
        try:
            yield
        finally:
            signal.signal(self._SIGNAL, before)
            self.conn.close()
            self._word.close()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Be in the function, and so open to interruption, for the time of a ``with``."""
        self._in_function = True
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Be out of the function, which is no longer interrupted."""
        self._in_function = False
        self.has_left.set()

    def _leave_function(self, number: int, frame: FrameType | None) -> None:
        if self._in_function and self._is_called:  # other programs send the signal too, as Go's do to themselves
            raise _AnotherFailed

    def report(self, outcome: Outcome) -> bool:
        """Hand the supervisor the outcome, if it is the first; return whether it is."""
        with self._reporting:
            if self._outcome is not None:
                return False
            self._outcome = outcome
            with suppress(OSError):  # the supervisor has found another failure, and is done
                self._word.send(outcome)
        return True

    @property
    def has_failed(self) -> bool:
        """Whether a failure is what was reported."""
        return self._outcome is not None and self._outcome.failed

    def stalled(self, report: str) -> None:
        """End the run, in which no rank moves."""
        self.report(failure(0, WorkerTimeoutError(report, rank=0, host=socket.gethostname())))

    def signal(self, number: int, *, with_children: bool = True) -> None:
        main = threading.main_thread().ident
        assert main is not None
        self._is_called = True
        if not self.has_left.is_set():
            signal.pthread_kill(main, self._SIGNAL)

    def exitcode(self, seconds: float) -> int | None:
        return 0 if self.has_left.wait(seconds) else None


class _Watch(threading.Thread):
    """Thread that supervises all ranks, of which rank 0 works in the main thread."""

    def __init__(self, zero: _RankZero, others: list[CommandProcess], met: store_file.Meeting) -> None:
        super().__init__(name="distwrap-script-watch", daemon=True)
        self._zero, self._others, self._met = zero, others, met
        self.interrupted = False
        self._error: BaseException | None = None
        self._outcomes: list[Outcome] = []

    def run(self) -> None:
        try:
            self._outcomes = supervise([self._zero, *self._others], self._met, rank_zero_is_caller=True)
        except BaseException as error:  # noqa: BLE001 - it is raised in the main thread
            self._error = error

    def interrupt(self) -> None:
        """End a collective that keeps rank 0 from seeing a Ctrl-C, by ending the other ranks."""
        seconds = 0.0 if self.interrupted else INTERRUPT_SECONDS
        self.interrupted = True
        threading.Thread(target=self._leave_it_alone, args=(seconds,), daemon=True).start()

    def _leave_it_alone(self, seconds: float) -> None:
        if not self._zero.has_left.wait(seconds):
            for process in self._others:
                process.signal(signal.SIGKILL)

    def outcomes(self) -> list[Outcome]:
        """Wait for the others' reports, after rank 0's own work."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._outcomes

    def cause_of(self, error: BaseException) -> BaseException:
        """Return, after a failure of rank 0, the one that came first and caused it, which may be this one."""
        try:
            error = failures.explained(error)
            is_told = self._zero.report(failure(0, error))
            by_hand = isinstance(error, KeyboardInterrupt)
            # Of a failure the supervisor hears and makes an end; else rank 0 had done its work.
            self.join(None if self._zero.has_failed else 0 if by_hand else CAUSE_SECONDS)
        except KeyboardInterrupt as pending:  # it was not heard inside a collective
            return pending
        if self.interrupted and not by_hand:
            return KeyboardInterrupt()
        mine = by_hand or (is_told and getattr(self._error, "rank", None) == 0)
        return error if mine or self._error is None else self._error
