"""``launcher="elastic"``: ranks that start again after a failure, on nodes that may come and go.

torch's agent on each node starts the ranks, ends them all when one fails or a node comes or goes, and starts them
again. Our worker is what it starts, and outcomes come home in files, so that the caller gets the same as from the other
launchers. Source: https://docs.pytorch.org/docs/stable/elastic/agent.html.
"""

import contextlib
import functools
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from distwrap import locked_folder
from distwrap.data import workers
from distwrap.environments import Placement, detect
from distwrap.errors import ArrivalError
from distwrap.group.world import say
from distwrap.launch import fork_safety, worker
from distwrap.launch.base import Job, Launcher
from distwrap.launch.fork import ForkLauncher
from distwrap.launch.logs import Logs, copied
from distwrap.launch.other_callers import NodeSummary
from distwrap.launch.outcome import Outcome, death as death_of, first_cause, raise_failure
from distwrap.launch.processes import ONE_HASH, OomCount
from distwrap.launch.task import Assignment, NodePlan, Task
from distwrap.network import connectivity, interfaces
from distwrap.seeding import preserved
from distwrap.supervision import board

JOIN_SECONDS = 120.0  # for as many nodes to come as are needed
LAST_CALL_SECONDS = 5.0  # for more nodes than these
MONITOR_SECONDS = 0.1

_KIND = "restarts"  # of our temporary folders
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGENTS = ("TORCHELASTIC_", "TORCH_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")  # its variables


class ElasticLauncher(Launcher):
    """Ranks that torch elastic's agent starts and watches.

    Args:
        start_method: multiprocessing's, by which the agent starts them; by default fork where that is safe, else spawn.
    """

    name = "elastic"
    several_nodes = True
    restarts = True
    runs_one_rank = True
    writes_logs = True

    def __init__(self, start_method: str = "") -> None:
        self.start_method = start_method or ("spawn" if fork_safety.refusal() else "fork")

    def check(self, job: Job) -> None:
        if self.start_method == "fork":
            ForkLauncher().check(job)

    def plan(self, job: Job) -> Assignment:
        if self.start_method == "fork":
            return replace(ForkLauncher().plan(job), launcher=self.name)
        return super().plan(job)

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        began = time.monotonic()
        locked_folder.remove_abandoned(_KIND)  # of callers that were killed before they could
        with ExitStack() as stack:
            folder = locked_folder.make(_KIND)
            stack.callback(locked_folder.remove, folder)
            stack.callback(workers.remove_what_is_left)
            stack.enter_context(_as_it_was())
            self._run(job, plan, folder)
            # Where nodes came, torch counts no new attempt, and ranks that had to end may have left how they did.
            reports = [report for report in _reports(folder) if not report[0].failed]
            outcomes, place = [outcome for outcome, _ in reports], reports[0][1]
            if place.rank > 0:
                ranks, host = tuple(outcome.rank for outcome in outcomes), str(place.master_addr)
                seconds = time.monotonic() - began
                self.summary = NodeSummary(place.node_rank, ranks, place.world_size, host, seconds)
            return outcomes

    def _run(self, job: Job, plan: Assignment, folder: Path) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import api
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from distwrap.launch import agents

        agents.register()
        _hush()
        oom_kills, nodes = OomCount(), job.nodes
        rendezvous, local_addr = _rendezvous(nodes, folder)
        config = LaunchConfig(
            min_nodes=nodes.min_nodes,
            max_nodes=nodes.max_nodes,
            nproc_per_node=job.nprocs,
            run_id="distwrap",
            rdzv_backend=agents.NAME,
            max_restarts=nodes.max_restarts,
            monitor_interval=MONITOR_SECONDS,
            start_method=self.start_method,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),  # by default a folder that nobody removes
            local_addr=local_addr,
            **rendezvous,
        )
        task, log_dir = job.task if self.start_method == "fork" else None, job.task.options.log_dir
        Logs(log_dir, ()).close()  # makes the folder, or refuses it
        death = None
        try:
            elastic_launch(config, be_a_rank)(plan, task, str(folder), log_dir)
        except ChildFailedError as error:
            rank, failed = error.get_first_failure()
            death = death_of(rank, failed.pid, failed.exitcode, oom_kills())
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        except api.RendezvousError as error:
            _raise_failure(folder)
            raise ArrivalError(
                f"{socket.gethostname()}: the nodes did not come together at {nodes.host}:{nodes.port} "
                f"({type(error).__name__}: {error}). At least {nodes.min_nodes} must come within {JOIN_SECONDS:.0f} s: "
                f"start the same command on every one. {interfaces.ADVICE}"
            ) from error
        if death is not None:
            _raise_failure(folder, death)


def _rendezvous(nodes: NodePlan, folder: Path) -> tuple[dict[str, Any], str]:
    """Return where torch's agents meet, and this one's address."""
    limits = {"join_timeout": JOIN_SECONDS, "last_call_timeout": LAST_CALL_SECONDS}
    if not nodes.several:  # no port that somebody could connect to
        return {"rdzv_endpoint": str(folder / "agents"), "rdzv_configs": {**limits, "store_type": "file"}}, "127.0.0.1"
    host, port = str(nodes.host), nodes.port
    local_host = interfaces.is_local(host)
    holds = nodes.node_rank == 0 if nodes.node_rank is not None else local_host and not connectivity.answers(host, port)
    if not holds:
        connectivity.reach(host, [port], JOIN_SECONDS)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    address = interfaces.source_address(host) or socket.gethostname()
    return {"rdzv_endpoint": endpoint, "rdzv_configs": {**limits, "is_host": str(holds)}}, address


# In a rank


def be_a_rank(plan: Assignment, task: Task | None, folder: str, log_dir: str | None) -> None:
    """Be a rank that torch's agent has started."""
    code = 1
    try:
        with copied(log_dir, int(os.environ["RANK"])):
            code = worker.work(_FolderLink(plan, folder), task)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code:
            # Of an exception, also of the one that torch's agent sends to the other ranks, torch's own worker would
            # leave a file that nobody removes. A forked process's exit handlers are its caller's.
            os._exit(1)


class _FolderLink:
    """The link of a rank that torch's agent has started: outcomes are files in a folder of the launch."""

    def __init__(self, plan: Assignment, folder: str) -> None:
        self._plan, self._folder = plan, Path(folder)
        self._attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def tie(self) -> None:
        worker.tie_to_parent()

    def assignment(self) -> Assignment:
        agents = {name: value for name, value in os.environ.items() if name.startswith(_AGENTS)}
        surroundings = self._plan.surroundings
        if surroundings is not None:
            surroundings = replace(surroundings, environ={**surroundings.environ, **agents})
        placement = detect(os.environ if surroundings is None else surroundings.environ)
        assert isinstance(placement, Placement)
        if self._plan.secret:  # all ranks are of this caller, and need no port to meet
            file = str(self._folder / f"store-{self._attempt}")
            placement = replace(placement, master_addr=None, master_port=None, job=file)
            board.hold(file, f"{file}-board")
        self._placement = placement
        if placement.rank == 0 and self._attempt > 0:
            self._tell_of_restart()
        return replace(self._plan, surroundings=surroundings, placement=placement)

    def report(self, outcome: Outcome) -> None:
        part = self._folder / f"part-{self._attempt}.{outcome.rank}"
        part.write_bytes(pickle.dumps((outcome, self._placement)))
        part.rename(self._folder / f"attempt-{self._attempt}.{outcome.rank}")

    def _tell_of_restart(self) -> None:
        before = [outcome for outcome, _ in _reports(self._folder, self._attempt - 1) if outcome.failed]
        why = "a rank, or a node, ended without a word"
        if before:
            cause = first_cause(before)
            if not cause.is_secondary:
                why = f"rank {cause.rank} on {cause.host} raised {cause.summary}"
        limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        say(f"restart {self._attempt} of at most {limit}: {why}")


def _reports(folder: Path, attempt: int | None = None) -> list[tuple[Outcome, Placement]]:
    """Read what the ranks of an attempt, by default the last, have left, in rank order."""
    attempts: dict[int, list[tuple[Outcome, Placement]]] = {}
    for path in folder.glob("attempt-*.[0-9]*"):
        attempts.setdefault(int(path.stem.removeprefix("attempt-")), []).append(pickle.loads(path.read_bytes()))
    which = max(attempts, default=0) if attempt is None else attempt
    return sorted(attempts.get(which, []), key=lambda report: report[0].rank)


# In the caller


def _raise_failure(folder: Path, death: Outcome | None = None) -> None:
    """Raise what has failed in the last attempt: a rank's own exception where one has left it, else its death."""
    failed = [outcome for outcome, _ in _reports(folder) if outcome.failed]
    if death is not None and not failed:
        failed = [death]
    if failed:
        raise_failure(failed)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Give the caller back what torch's agent changes: signal handlers, variables, random numbers and log levels."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if main else {}
    environ = dict(os.environ)
    # A store of each round's own, so that a rank never reads what an earlier round has left.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update({**ONE_HASH, **os.environ})
    levels = {name: logging.getLogger(name).level for name in _loggers()}
    _end_forks_plainly()
    try:
        with preserved():  # the agents number themselves at random
            yield
    finally:
        for name in _loggers():
            logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environ)


@functools.cache
def _end_forks_plainly() -> None:
    """Give forked ranks the usual signals: of what the agent's handlers raise there, torch leaves a file in /tmp."""

    def plainly() -> None:
        for number in _SIGNALS:
            if getattr(signal.getsignal(number), "__module__", "").startswith("torch.distributed.elastic"):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    os.register_at_fork(after_in_child=plainly)


def _hush() -> None:
    """Keep torch's agent from printing what is raised in the caller, or told by `say`."""
    if "LOGLEVEL" not in os.environ:
        for name in _loggers():
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _loggers() -> list[str]:
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    return [name for name in logging.root.manager.loggerDict if name.startswith(names)]
