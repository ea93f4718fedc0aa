"""The other ranks of a script under ``launcher="script"``, as rank 0's process sees them."""

import atexit
import os
from contextlib import ExitStack, suppress
from typing import Any

from distwrap.data import workers
from distwrap.environments import distwrap_environment
from distwrap.launch import command_line, store_file, transport
from distwrap.launch.base import Job, tell_of_crowd
from distwrap.launch.logs import Logs
from distwrap.launch.processes import CommandProcess
from distwrap.launch.supervisor import stop
from distwrap.launch.task import Assignment

_LEAVE_SECONDS = 5.0  # for the other ranks' exit handlers


class ParkedRanks:
    """The other ranks of this process's script, which stay from call to call.

    Attributes:
        processes: theirs; none before the first call, nor after a failure.
        failed: name of the call that has failed, after which there is no other.
        last_value: what the last decorated call returned.
        logs: of what all ranks print.
    """

    def __init__(self) -> None:
        self.processes: list[CommandProcess] = []
        self.failed = ""
        self.last_value: Any = None
        self.logs = Logs(None, ())
        self._store = ""

    def store_until_exit(self) -> str:
        """Return where all ranks meet in all calls of this process: the parked ones still hold it at the next."""
        if not self._store:
            stack = ExitStack()
            self._store = stack.enter_context(store_file.place())
            atexit.register(stack.close)
        return self._store

    def wake_or_start(self, job: Job, met: store_file.Rendezvous, plan: Assignment) -> None:
        """Let the parked ranks run on to this call, or start them."""
        if self.processes:
            self._send(transport.pack_result(self.last_value, "what the last decorated call returned"))
        else:
            self._start_all(job, met)
        self._send((met.store, job.task.name, plan.secret))

    def end(self, *, interrupt: bool) -> None:
        """End the ranks after a failure.

        Args:
            interrupt: begin with SIGINT, as after a Ctrl-C.
        """
        try:
            with suppress(KeyboardInterrupt):  # the failure itself is on its way, and nobody is left
                stop(self.processes, all_they_started=True, interrupt=interrupt)
        finally:
            self.processes.clear()
            workers.remove_what_is_left()

    def _start_all(self, job: Job, met: store_file.Rendezvous) -> None:
        self.logs = Logs(job.task.options.log_dir, met.ranks)
        atexit.register(self._let_leave)
        tell_of_crowd(len(met.ranks))
        try:
            for rank in met.ranks[1:]:
                env = {**os.environ, **distwrap_environment.variables(met.placement(rank), "script", met.store)}
                self.processes.append(_start(rank, command_line.command(rank), env, self.logs))
        except BaseException:
            stop(self.processes, all_they_started=True)
            self.processes.clear()
            self.logs.close()
            raise
        self.logs.start(keep=1)

    def _send(self, message: Any) -> None:
        for process in self.processes:
            with suppress(OSError):  # it is gone, of which the supervisor tells
                process.conn.send(message)

    def _let_leave(self) -> None:
        """Wait, at the end of this process, for the others' own exit handlers: they would be killed with it."""
        for process in self.processes:
            process.close()
        if any(process.exitcode(_LEAVE_SECONDS) is None for process in self.processes):
            stop(self.processes)
        self.processes.clear()
        workers.remove_what_is_left()
        self.logs.close()


def _start(rank: int, command: list[str], env: dict[str, str], logs: Logs) -> CommandProcess:
    def with_descriptor(fd: int) -> list[str]:
        env[distwrap_environment.SCRIPT] = str(fd)
        return command

    return CommandProcess(rank, with_descriptor, env, command_line.directory(), logs.streams(rank))
