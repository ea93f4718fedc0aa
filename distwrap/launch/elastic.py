"""``launcher="elastic"``: ranks that start again after a failure, on nodes that may come and go.

torch's agent on each node starts the ranks, ends them all when one fails or a node comes or goes, and starts them
again. What it starts is in `distwrap.launch.elastic_rank`; the caller gets the same as from the other launchers.
Source: https://docs.pytorch.org/docs/stable/elastic/agent.html.
"""

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from distwrap import locked_folder
from distwrap.data import workers
from distwrap.errors import ArrivalError, LaunchError
from distwrap.launch import fork_safety
from distwrap.launch.base import Job, Launcher
from distwrap.launch.elastic_rank import rank_main
from distwrap.launch.fork import ForkLauncher
from distwrap.launch.logs import Logs
from distwrap.launch.outcome import Outcome, OutcomeFolder, death as death_of, raise_if_failed
from distwrap.launch.peer_launchers import NodeSummary
from distwrap.launch.processes import ONE_HASH, OomCount
from distwrap.launch.task import Assignment, NodePlan
from distwrap.network import connectivity, interfaces
from distwrap.seeding import preserved

JOIN_SECONDS = 120.0  # for as many nodes to come as are needed
LAST_CALL_SECONDS = 5.0  # for more nodes than these
MONITOR_SECONDS = 0.1

_KIND = "restarts"  # of our temporary folders
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


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
            done = [each for each in OutcomeFolder.of_last_attempt(folder).read() if not each[0].failed]
            if not done:
                raise LaunchError("all ranks have ended without an exception, and without a result, as by os._exit(0).")
            outcomes, place = [outcome for outcome, _ in done], done[0][1]
            if place.rank > 0:
                ranks, host = tuple(outcome.rank for outcome in outcomes), str(place.master_addr)
                seconds = time.monotonic() - began
                self.summary = NodeSummary(place.node_rank, ranks, place.world_size, host, seconds)
            return outcomes

    def _run(self, job: Job, plan: Assignment, folder: Path) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import api
        from torch.distributed.launcher.api import elastic_launch

        config = _config(job, folder, self.start_method)
        _hush()
        oom_kills, nodes = OomCount(), job.nodes
        task, log_dir = job.task if self.start_method == "fork" else None, job.task.options.log_dir
        Logs(log_dir, ()).close()  # makes the folder, or refuses it
        try:
            elastic_launch(config, rank_main)(plan, task, str(folder), log_dir)
            return
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
                f"({type(error).__name__}: {error}). At least {nodes.min_nodes} nodes must come within "
                f"{JOIN_SECONDS:.0f} s: start the same command on every node. {interfaces.ADVICE}"
            ) from error
        _raise_failure(folder, death)


def _config(job: Job, folder: Path, start_method: str) -> Any:
    """Return the launch in torch's words."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from distwrap.launch import agents

    agents.register()
    nodes = job.nodes
    rendezvous, local_addr = _rendezvous(nodes, folder)
    return LaunchConfig(
        min_nodes=nodes.min_nodes,
        max_nodes=nodes.max_nodes,
        nproc_per_node=job.nprocs,
        run_id="distwrap",
        rdzv_backend=agents.NAME,
        max_restarts=nodes.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        start_method=start_method,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),  # by default a folder that nobody removes
        local_addr=local_addr,
        **rendezvous,
    )


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


def _raise_failure(folder: Path, death: Outcome | None = None) -> None:
    """Raise what has failed in the last attempt: a rank's own exception where one has left it, else its death."""
    outcomes = [outcome for outcome, _ in OutcomeFolder.of_last_attempt(folder).read()]
    if death is not None and not any(outcome.failed for outcome in outcomes):
        outcomes.append(death)
    raise_if_failed(outcomes)


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
