"""``launcher="replicas"``, which ``max_lost=`` chooses: a rank that is lost is started again while the others go on.

The launcher starts torchft's lighthouse, which tells the ranks who is there, in a process of its own. A rank that has
died or raised an exception is replaced; the call ends when those that are there return.
Source: https://docs.pytorch.org/torchft/
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap import retrofit
from distwrap.data import workers
from distwrap.environments import distwrap_environment
from distwrap.errors import LaunchError, OptionError, WorkerTimeoutError
from distwrap.launch import transport
from distwrap.launch.base import Job, Launcher
from distwrap.launch.forkserver import ForkServerLauncher
from distwrap.launch.local import LocalLauncher
from distwrap.launch.logs import Logs
from distwrap.launch.outcome import Outcome, raise_failure
from distwrap.launch.processes import OomCount, Process, python_command
from distwrap.launch.signals import PassedOn, end_in_one_line
from distwrap.launch.spawn import SpawnLauncher
from distwrap.launch.store_file import place
from distwrap.launch.supervisor import outcome_of, stop, wait_for_ends
from distwrap.launch.task import Assignment
from distwrap.launch.worker import tie_to_parent
from distwrap.network import stores
from distwrap.wording import named_ranks, print_notice

_MOST_TRIES = 5  # of a rank that dies before it takes a step
_LOOK_SECONDS = 1.0  # between looks for ranks that stand still
_LIGHTHOUSE_SECONDS = 60.0  # for it to start, which takes the import of torch


class ReplicasLauncher(Launcher):
    """Ranks of which each is replaced when it is lost.

    Args:
        start_method: of the other launcher whose processes they are: ``"spawn"``, or by default forks of a server.
    """

    name = "replicas"
    writes_logs = True

    def __init__(self, start_method: str = "") -> None:
        self.start_method = start_method

    def count(self, nprocs: int | Literal["auto"]) -> int:
        return self._processes().count(nprocs)

    def check(self, job: Job) -> None:
        most = job.task.options.strategy.max_lost  # type: ignore[union-attr]
        if job.nodes.several:
            raise OptionError("max_lost= works on one node only, so far. On several nodes use max_restarts=.")
        if most >= job.nprocs:
            raise OptionError(f"max_lost={most}, but there are {job.nprocs} ranks: at least one must be left.")
        if job.task.options.launcher not in ("auto", "forkserver", "spawn", self.name):
            raise OptionError(
                f"max_lost= starts the ranks by its own launcher, and launcher={job.task.options.launcher!r} "
                "was given too: leave launcher out."
            )

    def plan(self, job: Job) -> Assignment:
        plan = replace(super().plan(job), launcher=self.name)
        return replace(plan, returns="all")  # rank 0 may be another one in the end

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        ranks = tuple(range(job.nprocs))
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(PassedOn())
            store = stack.enter_context(place())
            logs = stack.enter_context(contextlib.closing(Logs(job.task.options.log_dir, ranks)))
            address, lighthouse = stack.enter_context(_lighthouse(job))
            stack.callback(workers.remove_what_is_left)
            replicas = _Replicas(self._processes(), job, _with_lighthouse(plan, address), store, lighthouse)
            return replicas.watch(logs, signals)

    def bring_home(self, job: Job, outcomes: Sequence[Outcome]) -> Any:
        there = sorted(outcomes, key=lambda outcome: outcome.rank)
        task = job.task
        found = retrofit.find(task.function, task.args, task.kwargs) if task.options.retrofit else []
        own, values, is_loaded = [item.original for item in found], [], not found
        for outcome in there:
            if outcome.value is not None:
                value, states = transport.unpack_result(outcome.value, own)
                values.append(value)
                if states and not is_loaded:
                    is_loaded = True
                    for item, state in zip(found, states, strict=True):
                        item.load(state)
        if not is_loaded:
            raise LaunchError(
                "rank 0, from which retrofit=True takes what was trained, was lost, and did not come back."
            )
        return values if job.returns == "all" else values[0]

    def _processes(self) -> LocalLauncher:
        return SpawnLauncher() if self.start_method == "spawn" else ForkServerLauncher()


def _with_lighthouse(plan: Assignment, address: str) -> Assignment:
    assert plan.surroundings is not None
    environ = {**plan.surroundings.environ, "TORCHFT_LIGHTHOUSE": address}
    return replace(plan, surroundings=replace(plan.surroundings, environ=environ))


class _Replicas:
    """Ranks of one launch, and their replacements."""

    def __init__(self, launcher: LocalLauncher, job: Job, plan: Assignment, store: str, lighthouse: Connection) -> None:
        self._launcher, self._job, self._plan, self._lighthouse = launcher, job, plan, lighthouse
        self._strategy: Any = job.task.options.strategy
        self._place = store
        self._store: Store = stores.from_outside(store)
        self._running: list[Process] = []
        self._lost_processes: list[Process] = []
        self._ended: list[Process] = []  # that stood still
        self._done_processes: list[Process] = []
        self._done: list[Outcome] = []
        self._failed: list[Outcome] = []
        self._tries: dict[int, list[str]] = {}  # how each rank has failed since it took a step
        self._oom_kills = OomCount()

    def watch(self, logs: Logs, signals: PassedOn) -> list[Outcome]:
        """Start all ranks, and those that are lost again, until those that are there have returned.

        Raises:
            BaseException: what a rank raised, where it cannot be replaced.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._logs, self._signals = logs, signals
        try:
            for rank in range(self._job.nprocs):
                self._start(rank)
            logs.start()
            signals.listen(self._running, self._print_who_runs)
            self._collect()
        except BaseException as error:
            by_hand = isinstance(error, KeyboardInterrupt) and getattr(error, "rank", None) is None
            if by_hand:
                end_in_one_line(error)
            ended = [*self._lost_processes, *self._done_processes]
            stop([*self._running, *ended], all_they_started=True, interrupt=by_hand)
            raise
        stop(self._running, all_they_started=True)  # who has come back too late to be let in
        signals.ended(wait_for_ends(self._done_processes))
        stop([*self._lost_processes, *self._done_processes], all_they_started=True)
        return self._done

    def _start(self, rank: int) -> None:
        process = self._launcher.start(self._job, rank, [], self._logs.streams(rank))
        self._running.append(process)
        assignment = replace(
            self._plan, placement=distwrap_environment.on_one_node(rank, self._job.nprocs), store=self._place
        )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead at birth, as its end tells
            process.conn.send_bytes(pickle.dumps(assignment, pickle.HIGHEST_PROTOCOL))

    def _collect(self) -> None:
        seconds = self._job.seconds
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while self._running and not (self._done and not self._there()):
            ready = wait([self._lighthouse, *(process.conn for process in self._running)], _LOOK_SECONDS)
            if self._lighthouse in ready and not self._done:
                raise LaunchError(
                    "torchft's lighthouse, the process from which the ranks learn who takes part, has ended by itself."
                )
            if time.monotonic() > deadline:
                self._raise_late()
            self._end_left_behind()
            for process in [each for each in self._running if each.conn in ready]:
                was_there = process in self._there()
                self._running.remove(process)
                outcome = outcome_of(process, self._oom_kills)
                (self._lost_processes if outcome.failed else self._done_processes).append(process)
                if not outcome.failed:
                    self._done.append(outcome)
                elif self._done and was_there:
                    raise_failure([outcome])  # all had come to the end of the function: nobody goes on
                elif not self._done:
                    self._lost(process, outcome)

    def _end_left_behind(self) -> None:
        """Kill ranks that do not move while the others go on, so that each of them is started again."""
        there = self._there()
        for process in self._running if not self._done else ():
            if process not in self._ended and self._is("there", process) and process not in there:
                self._ended.append(process)
                print_notice(f"rank {process.rank} (pid {process.pid}) does not move any more, and is killed")
                process.signal(signal.SIGKILL)

    def _print_who_runs(self) -> None:
        """Print which ranks are running, in answer to SIGQUIT."""
        ranks = ", ".join(f"rank {each.rank} (pid {each.pid})" for each in self._running)
        print_notice(f"these ranks are running: {ranks}")

    def _raise_late(self) -> None:
        late = [process.rank for process in self._running]
        for process in self._running:
            process.signal(signal.SIGABRT)  # faulthandler prints the Python stacks of all its threads
        time.sleep(1)
        raise WorkerTimeoutError(
            f"{named_ranks(late)} of {self._job.nprocs} on {socket.gethostname()} did not finish within "
            f"{self._job.seconds:g} s. The whole stack of each was printed on standard error.",
            rank=late[0],
            host=socket.gethostname(),
        )

    def _lost(self, process: Process, outcome: Outcome) -> None:
        """Start a lost rank again, or raise the cause if that would not help."""
        self._failed.append(outcome)
        self._store.set(f"gone/{outcome.rank}", "")
        there = self._there()
        begun = self._store.check(["begun"])
        # Those that no replacement has made good.
        open_failures = [each for each in self._failed if each.rank not in {other.rank for other in there}]
        tries = self._tries.setdefault(outcome.rank, [])
        if self._is("committed", process):
            tries.clear()
        tries.append(outcome.summary)
        is_mistake = bool(outcome.traceback) and tries.count(outcome.summary) > 1
        if (begun and not there) or is_mistake or len(tries) > _MOST_TRIES or self._is_to_end(outcome):
            if outcome.traceback and not there and len(open_failures) > 1:  # of which the first is raised
                print_notice(f"rank {outcome.rank} (pid {process.pid}) has failed too: {_words(outcome)}")
            raise_failure([outcome] if there else open_failures[-self._job.nprocs :])
        process.signal(signal.SIGKILL)  # and what it has started
        if any(self._store.check([f"end/{rank}"]) for rank in range(self._job.nprocs)):
            if outcome.traceback or outcome.rank < min(each.rank for each in there):  # who is rank 0 to the program
                raise_failure([outcome])
            print_notice(
                f"rank {outcome.rank} (pid {process.pid}) is lost, and not started again, since the others "
                f"have finished: {_words(outcome)}"
            )
            return
        if self._strategy.come_back:
            print_notice(f"rank {outcome.rank} (pid {process.pid}) is lost, and is started again: {_words(outcome)}")
            self._start(outcome.rank)
        elif len(self._failed) > self._strategy.max_lost:
            raise_failure(self._failed)
        else:
            print_notice(f"rank {outcome.rank} (pid {process.pid}) is lost, and the others go on: {_words(outcome)}")

    def _is_to_end(self, outcome: Outcome) -> bool:
        """Return whether a rank has ended because the program or the user wants the run to end."""
        return self._signals.has_heard or outcome.summary.startswith(("SystemExit", "KeyboardInterrupt"))

    def _there(self) -> list[Process]:
        """Return the ranks that take part in the training now."""
        gone = {process.rank for process in self._running if self._store.check([f"gone/{process.rank}"])}
        return [process for process in self._running if process.rank not in gone and self._is("there", process)]

    def _is(self, what: str, process: Process) -> bool:
        """Return whether a rank is there, among the others, or has committed a step."""
        return bool(self._store.check([f"{what}/{process.pid}"]))


def _words(outcome: Outcome) -> str:
    return outcome.traceback.strip() or outcome.summary.partition(": ")[2]


@contextlib.contextmanager
def _lighthouse(job: Job) -> Iterator[tuple[str, Connection]]:
    """Run torchft's lighthouse in a process that dies with this one; yield its address, and what tells its end."""
    strategy: Any = job.task.options.strategy
    settings = {
        "bind": "127.0.0.1:0",
        "min_replicas": job.nprocs - strategy.max_lost,
        "join_timeout_ms": round(1000 * job.task.options.timeout),
        "quorum_tick_ms": 50,
        "heartbeat_timeout_ms": round(1000 * strategy.heartbeat_seconds),
    }
    ours, theirs = Pipe()
    code = f"from distwrap.launch.replicas import serve; serve({theirs.fileno()}, {settings!r})"
    process = subprocess.Popen(
        python_command(code),
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    try:
        if not ours.poll(_LIGHTHOUSE_SECONDS):
            raise LaunchError(f"torchft's lighthouse did not start within {_LIGHTHOUSE_SECONDS:g} s.")
        try:
            address = str(ours.recv())
        except EOFError:
            raise LaunchError("torchft's lighthouse ended as it started: can `import torchft` be done here?") from None
        yield address, ours
    finally:
        process.kill()
        process.wait()
        ours.close()


def serve(fd: int, settings: dict[str, Any]) -> None:
    """Run the lighthouse until the launcher ends this process, or is gone."""
    tie_to_parent()
    from torchft.coordination import LighthouseServer

    conn = Connection(fd)
    server = LighthouseServer(**settings)
    conn.send(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    os.set_inheritable(fd, False)
    with contextlib.suppress(EOFError, OSError):
        conn.recv()
