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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from distwrap import retrofit
from distwrap.data import workers
from distwrap.environments import distwrap_environment
from distwrap.environments.variables import variables_set
from distwrap.errors import LaunchError, WorkerTimeoutError
from distwrap.group import failures
from distwrap.group.setup import teardown_process_group
from distwrap.launch import command_line, script_rank, store_file, transport
from distwrap.launch.base import Job, Launcher
from distwrap.launch.logs import Logs, redirected
from distwrap.launch.outcome import Outcome, failure
from distwrap.launch.processes import CommandProcess
from distwrap.launch.signals import hear_interrupts
from distwrap.launch.supervisor import INTERRUPT_SECONDS, SETTLE_SECONDS, print_where_all_are, stop, supervise
from distwrap.launch.task import Assignment
from distwrap.launch.worker import take_part, use_threads

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
        _wake_or_start(job, met, plan)
        plan = replace(plan, placement=met.placement(0), store=met.store)
        watch = _Watch(list(_ranks.parked), met)
        with (
            variables_set(distwrap_environment.variables(plan.placement, self.name, met.store)),
            ExitStack() as stack,
            redirected(_ranks.logs.streams(0)),
            hear_interrupts(watch.interrupt, lambda: print_where_all_are(met)),
        ):
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            watch.start()
            try:
                use_threads(plan)
                value, found = take_part(plan, job.task, watch.stall)
                self._value = _ranks.last_value = retrofit.unwrapped(value, found)
                watch.rank_zero_is_done.set()
                teardown_process_group()
                return watch.wait()
            except BaseException as error:
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
            process.conn.send(data)
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
        process.conn.send((met.store, job.task.name, plan.secret))


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
        teardown_process_group()


def _let_the_parked_leave() -> None:
    """Wait, at the end of this process, for the others' own exit handlers: they would be killed with it."""
    for process in _ranks.parked:
        process.close()
    if any(process.exitcode(_LEAVE_SECONDS) is None for process in _ranks.parked):
        stop(_ranks.parked)
    _ranks.parked.clear()
    workers.remove_what_is_left()
    _ranks.logs.close()


class _Watch(threading.Thread):
    """Thread that watches the other ranks while rank 0 works in the main thread, and interrupts it when one fails."""

    def __init__(self, processes: list[CommandProcess], met: store_file.Meeting) -> None:
        super().__init__(name="distwrap-script-watch", daemon=True)
        self._processes, self._met = processes, met
        self.rank_zero_is_done = threading.Event()
        self.error: BaseException | None = None
        self.interrupted = False
        self._outcomes: list[Outcome] = []

    def run(self) -> None:
        try:
            self._outcomes = supervise(self._processes, self._met, rank_zero_is_done=self.rank_zero_is_done)
        except BaseException as error:  # noqa: BLE001 - it is raised in the main thread
            self._fail(error)

    def stall(self, report: str) -> None:
        """End the run, in which no rank moves."""
        self._fail(WorkerTimeoutError(report, rank=0, host=socket.gethostname()))

    def _fail(self, error: BaseException) -> None:
        if self.error is not None or self.interrupted:
            return
        self.error = error
        if not self.rank_zero_is_done.is_set():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)  # wakes it from a sleep or a read as well

    def interrupt(self) -> None:
        """End a collective that keeps rank 0 from seeing a Ctrl-C, by ending the other ranks."""
        if self.error is not None:
            return  # it was our own
        seconds = 0.0 if self.interrupted else INTERRUPT_SECONDS
        self.interrupted = True
        threading.Thread(target=self._leave_it_alone, args=(seconds,), daemon=True).start()

    def _leave_it_alone(self, seconds: float) -> None:
        if not self.rank_zero_is_done.wait(seconds):
            for process in self._processes:
                process.signal(signal.SIGKILL)

    def wait(self) -> list[Outcome]:
        """Wait for the others' reports, after rank 0's own work."""
        self.join()
        if self.error is not None:
            raise self.error
        return self._outcomes

    def cause_of(self, error: BaseException) -> BaseException:
        """Return, after a failure of rank 0, another rank's instead where that came first and caused it."""
        try:
            error = failures.explained(error)
            self.rank_zero_is_done.set()
            self.join(SETTLE_SECONDS)
        except KeyboardInterrupt as pending:  # of a Ctrl-C not heard inside a collective, or our own that came late
            error = pending
        an_effect = isinstance(error, KeyboardInterrupt) or failure(0, error).is_secondary
        return self.error if self.error is not None and an_effect else error
