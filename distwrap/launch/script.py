"""Launch by running the script again: this process is rank 0, and the other ranks run the same command line.

Nothing is pickled. Each of the other ranks runs the script from its top, reaches the decorated call, joins, and parks
at the call's end: if rank 0 makes another decorated call, they take rank 0's result of the last one and run on to it;
else they leave when rank 0 does.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from distwrap import retrofit
from distwrap._internals.python import run_interpreter_end
from distwrap.data import workers
from distwrap.devices.cpus import choose_threads
from distwrap.environments import distwrap_environment
from distwrap.errors import LaunchError, WorkerTimeoutError
from distwrap.group import failures
from distwrap.group.setup import announce, join, teardown_process_group
from distwrap.group.world import RunOptions
from distwrap.launch import command_line, store_file, transport
from distwrap.launch.execute import Call, execute
from distwrap.launch.interrupts import hear_interrupts
from distwrap.launch.logs import Logs, redirected
from distwrap.launch.outcome import Outcome, failure, success
from distwrap.launch.processes import CommandProcess, kill
from distwrap.launch.supervisor import (
    INTERRUPT_SECONDS,
    SETTLE_SECONDS,
    print_where_all_are,
    stop,
    supervise,
)
from distwrap.launch.worker import become_a_rank, stalled, tell_failure

FD = "DISTWRAP_SCRIPT_FD"

_LEAVE_SECONDS = 5.0  # for the other ranks' exit handlers

_parked: list[CommandProcess] = []
_place = ""
_last_value: Any = None
_failed = ""
_logs: Logs | None = None
_conn: Connection | None = None


def launch(call: Call, run: RunOptions, nprocs: int, *, everybody: bool) -> Any:
    """Run the call as rank 0, with `nprocs` - 1 others; return rank 0's value, or the list of all."""
    global _last_value, _failed
    if _failed:
        raise LaunchError(
            f"{_failed} has failed before, and with launcher='script' the other ranks, which run the script from its "
            f"top, cannot come to {call.name} again. Use launcher='forkserver' to go on after a failure."
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("launcher='script' runs rank 0 in the caller, so the call must be in the main thread.")
    # One place for all calls of this process: the parked ranks still hold it when the next call begins.
    store = _place or _place_until_exit()
    processes = _others(call, nprocs, store, run.log_dir)
    place = distwrap_environment.on_one_node(0, nprocs)
    news = _News(processes, store)
    value: Any = None
    with (
        _environment(distwrap_environment.variables(place, "script", store)),
        _threads(nprocs),
        redirected(_logs.streams(0) if _logs is not None else None),
        hear_interrupts(news.interrupt, news.print_where_all_are),
    ):
        news.start()
        try:
            world = join(place, run)
            announce(world, "script")
            assert world.channel is not None
            world.channel.on_stall = news.stall
            value, found = execute(call, run)
            value = retrofit.unwrapped(value, found)
            news.rank_zero_is_done.set()
            teardown_process_group()
            outcomes = news.wait()
        except BaseException as error:
            _failed = call.name
            cause: BaseException
            try:
                cause = news.cause_of(failures.explained(error))
            except KeyboardInterrupt as pending:  # of a Ctrl-C that was not heard inside a collective
                cause = pending
            finally:
                _end(news)
            if cause is error:
                raise
            raise cause from cause.__cause__
    _last_value = value
    if not everybody:
        return value
    return [value, *(transport.unpack_result(o.value) for o in outcomes if o.value is not None)]


def _end(news: _News) -> None:
    """After a failure: stop the others, so that nobody is left who could keep the teardown waiting."""
    try:
        stop(_parked, all_they_started=True, interrupt=news.interrupted)
    except KeyboardInterrupt:
        pass  # the failure itself is on its way, and nobody is left
    finally:
        _parked.clear()
        workers.remove_what_is_left(_place)
        teardown_process_group()


def _place_until_exit() -> str:
    global _place
    stack = ExitStack()
    _place = stack.enter_context(store_file.place())
    atexit.register(stack.close)
    return _place


def in_child() -> bool:
    """Say whether this process is one that `launch` started."""
    return FD in os.environ


def join_from_child(call: Call, run: RunOptions, launcher: str, *, everybody: bool) -> Any:
    """Take part in rank 0's call, and park at its end."""
    global _conn
    if launcher != "script":
        raise LaunchError(
            f"{call.name} has launcher={launcher!r} in a script whose other calls have launcher='script', so each of "
            f"its ranks would launch ranks of its own. Use the same launcher for all calls in a script."
        )
    if _conn is None:
        _conn = Connection(int(os.environ[FD]))
        become_a_rank(_conn)
    own_conn, rank = _conn, int(os.environ["RANK"])
    os.environ[distwrap_environment.STORE], name = _message(_conn)
    place = distwrap_environment.on_one_node(rank, int(os.environ["WORLD_SIZE"]))
    try:
        if name != call.name:
            raise LaunchError(
                f"rank {rank} has come to {call.name}, but rank 0 is at {name}: with launcher='script' every rank must "
                f"make the same decorated calls in the same order. Let no branch before them depend on the rank."
            )
        threads = choose_threads(place.local_world_size)
        if threads is not None:
            torch.set_num_threads(threads)
        world = join(place, run)
        assert world.channel is not None
        world.channel.on_stall = lambda report: stalled(report, own_conn, rank)
        value, found = execute(call, run)
        value = retrofit.unwrapped(value, found)
        data = transport.pack_result(value, f"what {call.name} returned on rank {rank}") if everybody else None
    except BaseException as error:  # noqa: BLE001 - SystemExit is told to rank 0 too
        tell_failure(_conn, rank, error)
        _leave(1)
    _conn.send(success(rank, data))
    teardown_process_group()
    sys.stdout.flush()
    return transport.unpack_result(_message(_conn))


def _message(conn: Connection) -> Any:
    """Wait, as long as it takes, for rank 0's word; leave when it leaves."""
    try:
        return conn.recv()
    except (EOFError, OSError):
        _leave(0)


def _leave(code: int) -> Any:
    run_interpreter_end(threads=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _others(call: Call, nprocs: int, store: str, log_dir: str | None) -> list[CommandProcess]:
    """Wake the parked ranks, or start them."""
    global _logs
    if _parked:
        if len(_parked) != nprocs - 1:
            raise LaunchError(
                f"launcher='script' has {len(_parked) + 1} ranks from the first decorated call, and this one asks for "
                f"{nprocs}. Ask for the same number in all calls, or use launcher='forkserver'."
            )
        data = transport.pack_result(_last_value, "what the last decorated call returned")
        for process in _parked:
            process.conn.send(data)
    else:
        _logs = Logs(log_dir, range(nprocs)) if log_dir is not None else None
        commands = [command_line.command(rank) for rank in range(1, nprocs)]
        atexit.register(_let_the_parked_leave)
        try:
            for rank, command in enumerate(commands, start=1):
                env = {
                    **os.environ,
                    **distwrap_environment.variables(distwrap_environment.on_one_node(rank, nprocs), "script", store),
                }
                _parked.append(_start(rank, command, env))
        except BaseException:
            stop(_parked, all_they_started=True)
            _parked.clear()
            _close_logs()
            raise
        if _logs is not None:
            _logs.start(keep=1)
    for process in _parked:
        process.conn.send((store, call.name))
    return list(_parked)


def _let_the_parked_leave() -> None:
    """At this process's end, wait for the others to run their own exit handlers: they would be killed with it."""
    for process in _parked:
        process.close()
    if any(process.exitcode(_LEAVE_SECONDS) is None for process in _parked):
        stop(_parked)
    _parked.clear()
    workers.remove_what_is_left(_place)
    _close_logs()


def _close_logs() -> None:
    global _logs
    if _logs is not None:
        _logs.close()
    _logs = None


def _start(rank: int, command: list[str], env: dict[str, str]) -> CommandProcess:
    def with_descriptor(fd: int) -> list[str]:
        env[FD] = str(fd)
        return command

    return CommandProcess(rank, with_descriptor, env, command_line.directory(), _logs.streams(rank) if _logs else None)


class _News(threading.Thread):
    """Watches the other ranks while rank 0 works in the main thread, and interrupts it when one fails."""

    def __init__(self, processes: list[CommandProcess], store: str) -> None:
        super().__init__(name="distwrap-script-watch", daemon=True)
        self._processes, self._store = processes, store
        self.rank_zero_is_done = threading.Event()
        self.error: BaseException | None = None
        self.interrupted = False
        self._outcomes: list[Outcome] = []

    def run(self) -> None:
        try:
            self._outcomes = supervise(
                self._processes,
                store=self._store,
                ranks=len(self._processes) + 1,
                rank_zero_is_done=self.rank_zero_is_done,
            )
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
        """End a rank 0 that a Ctrl-C does not reach: without peers a collective ends."""
        if self.error is not None:
            return  # it was our own
        seconds = 0.0 if self.interrupted else INTERRUPT_SECONDS
        self.interrupted = True
        threading.Thread(target=self._leave_it_alone, args=(seconds,), daemon=True).start()

    def _leave_it_alone(self, seconds: float) -> None:
        if not self.rank_zero_is_done.wait(seconds):
            for process in self._processes:
                kill(process, signal.SIGKILL)

    def print_where_all_are(self) -> None:
        """Answer SIGQUIT."""
        print_where_all_are(self._store, len(self._processes) + 1)

    def wait(self) -> list[Outcome]:
        """Wait for the others' reports, after rank 0's own work."""
        self.join()
        if self.error is not None:
            raise self.error
        return self._outcomes

    def cause_of(self, error: BaseException) -> BaseException:
        """After a failure of rank 0: return another rank's instead, where that came first and caused it."""
        self.rank_zero_is_done.set()
        self.join(SETTLE_SECONDS)
        an_effect = isinstance(error, KeyboardInterrupt) or failure(0, error).is_secondary
        return self.error if self.error is not None and an_effect else error


@contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _threads(nprocs: int) -> Iterator[None]:
    before, threads = torch.get_num_threads(), choose_threads(nprocs)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
