"""Ranks that are started again after a failure, on machines that may come and go: torch elastic watches them.

torch's agent on each machine starts the ranks, ends them all when one fails or a machine comes or goes, and starts them
again. Our worker is its entry, and results and failures come home in files, so that what the caller gets is the same
as from the other launchers. Source: https://docs.pytorch.org/docs/stable/elastic/agent.html.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from distwrap import retrofit
from distwrap.devices.cpus import choose_threads
from distwrap.environments import Placement, detect
from distwrap.errors import ArrivalError, ForkError, WorkerTimeoutError
from distwrap.group import failures
from distwrap.group.setup import abandon_process_group, teardown_process_group
from distwrap.group.world import RunOptions, say
from distwrap.launch import fork_safety, local, openmp, pickling, transport, worker
from distwrap.launch.execute import Call
from distwrap.launch.exit_reason import OomCount
from distwrap.launch.node_plan import NodePlan
from distwrap.launch.nodes import NodeSummary
from distwrap.launch.outcome import Outcome, death, failure, first_cause, raise_failure, success
from distwrap.launch.worker import Assignment, Surroundings
from distwrap.network import connectivity, interfaces
from distwrap.network.rendezvous import count_meetings_anew

JOIN_SECONDS = 120.0  # for as many machines to come as are needed
LAST_CALL_SECONDS = 5.0  # for more machines than these
MONITOR_SECONDS = 0.1

_PREFIX = "distwrap-elastic-"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGENTS = ("TORCHELASTIC_", "TORCH_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")  # its variables


def launch(call: Call, run: RunOptions, launcher: str, nprocs: int, machines: NodePlan, *, everybody: bool) -> Any:
    """Run the call under torch elastic, and return rank 0's value, or the list of all.

    Args:
        call: what to run.
        run: how.
        launcher: how the ranks start: ``"fork"``, ``"forkserver"``, ``"spawn"``; else whichever is safe.
        nprocs: how many ranks here.
        machines: which take part, and how often to start again.
        everybody: return every rank's value.

    Returns:
        The value where rank 0 was on this machine in the end, else a `NodeSummary`.

    Raises:
        BaseException: what a rank raised in the last attempt, in its own type.
        ArrivalError: fewer machines came than are needed.
    """
    found = retrofit.find(call.args, call.kwargs) if run.retrofit else []
    method = _method(launcher)
    threads = choose_threads(nprocs)
    common = Assignment(Placement(), "elastic", "", run, threads, everybody=everybody)
    if method == "fork":
        common = replace(common, threads=threads if openmp.pause() else 1)
    else:
        payload = transport.pack(call.function, call.args, call.kwargs)
        common = replace(
            common,
            surroundings=Surroundings.capture(),
            payload=payload,
            main_path=local.main_path(call, method, payload),
        )
    began = time.monotonic()
    _remove_what_the_killed_left()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder, _as_it_was():
        _run(common, call if method == "fork" else None, Path(folder), method, nprocs, machines)
        return _bring_home(Path(folder), found, began)


def _remove_what_the_killed_left() -> None:
    """Remove the folders of earlier callers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and os.path.isdir("/proc/self"):
            shutil.rmtree(folder, ignore_errors=True)


def _method(launcher: str) -> str:
    refusal = fork_safety.refusal()
    if launcher == "fork" and refusal:
        raise ForkError(f"launcher='fork' is not safe here: {refusal}. Use launcher='forkserver' or 'spawn'.")
    if launcher in ("fork", "forkserver", "spawn"):
        return launcher
    return "spawn" if refusal else "fork"


def _run(common: Assignment, call: Call | None, folder: Path, method: str, nprocs: int, machines: NodePlan) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import api
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _hush()
    oom_kills = OomCount()
    rendezvous, local_addr = _rendezvous(machines, folder)
    config = LaunchConfig(
        min_nodes=machines.min_nodes,
        max_nodes=machines.max_nodes,
        nproc_per_node=nprocs,
        run_id="distwrap",
        rdzv_backend="c10d",
        max_restarts=machines.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        start_method=method,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),  # by default a folder that nobody removes
        local_addr=local_addr,
        **rendezvous,
    )
    try:
        elastic_launch(config, be_a_rank)(common, call, str(folder))
    except ChildFailedError as error:
        _raise_failure(folder, error, oom_kills())
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    except (api.RendezvousTimeoutError, api.RendezvousConnectionError, api.RendezvousClosedError) as error:
        _raise_what_ranks_told(folder)
        raise ArrivalError(
            f"{socket.gethostname()}: the machines did not come together at {machines.host}:{machines.port} "
            f"({type(error).__name__}: {error}). At least {machines.min_nodes} must come within {JOIN_SECONDS:.0f} s: "
            f"start the same command on every one. {interfaces.ADVICE}"
        ) from error


def _rendezvous(machines: NodePlan, folder: Path) -> tuple[dict[str, Any], str]:
    """Say where torch's agents meet, and this one's address."""
    limits = {"join_timeout": JOIN_SECONDS, "last_call_timeout": LAST_CALL_SECONDS}
    if not machines.several:  # no port that somebody could connect to
        return {"rdzv_endpoint": str(folder / "agents"), "rdzv_configs": {**limits, "store_type": "file"}}, "127.0.0.1"
    host, port = str(machines.host), machines.port
    local_host = interfaces.is_local(host)
    holds = (
        machines.node_rank == 0
        if machines.node_rank is not None
        else local_host and not connectivity.answers(host, port)
    )
    if not holds:
        connectivity.reach(host, [port], JOIN_SECONDS)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    address = interfaces.source_address(host) or socket.gethostname()
    return {"rdzv_endpoint": endpoint, "rdzv_configs": {**limits, "is_host": str(holds)}}, address


def be_a_rank(common: Assignment, call: Call | None, folder: str) -> None:
    """Be a rank that torch's agent has started; leave an `Outcome` in the folder, and fail where the call does."""
    worker.stand_alone()
    count_meetings_anew()
    if call is not None:
        pickling.mark_as_forked()
    worker.prepare(common, keep=_AGENTS)
    placement = detect(os.environ)
    assert isinstance(placement, Placement)
    rank, attempt = placement.rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 0 and attempt > 0:
        _tell_of_restart(Path(folder), attempt)
    assignment = replace(common, placement=placement, value=local.wanted(placement, common.everybody))

    def stalled(report: str) -> None:  # in the side channel's thread, since the main thread does not move
        error = WorkerTimeoutError(report, rank=rank, host=socket.gethostname())
        _write(folder, attempt, failure(rank, error))
        os._exit(1)

    try:
        data = worker.run(assignment, call, stalled)
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are told too
        try:
            told = failures.explained(error)
            _write(folder, attempt, failure(rank, told))
            failures.tell(told)
            abandon_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Of an exception, also of the one that torch's agent sends to the other ranks, torch's own worker would
            # leave a file that nobody removes. A forked process's exit handlers are its caller's.
            os._exit(1)
    _write(folder, attempt, success(rank, data))
    summary = [placement.world_size, placement.node_rank, placement.master_addr]
    Path(folder, f"world.{rank}").write_text(json.dumps(summary))
    teardown_process_group()


def _tell_of_restart(folder: Path, attempt: int) -> None:
    before = [told for told in _outcomes(folder, attempt - 1) if told.failed]
    why = "a rank, or a machine, ended without a word"
    if before:
        cause = first_cause(before)
        if not cause.is_secondary:
            why = f"rank {cause.rank} on {cause.host} raised {cause.summary}"
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    say(f"restart {attempt} of at most {limit}: {why}")


def _write(folder: str, attempt: int, told: Outcome) -> None:
    part = Path(folder, f"part-{attempt}.{told.rank}")
    part.write_bytes(pickle.dumps(told))
    part.rename(Path(folder, f"attempt-{attempt}.{told.rank}"))


def _outcomes(folder: Path, attempt: int | None = None) -> list[Outcome]:
    """Read what the ranks of an attempt, by default the last, have left, in rank order."""
    attempts: dict[int, list[Outcome]] = {}
    for path in folder.glob("attempt-*.[0-9]*"):
        attempts.setdefault(int(path.stem.removeprefix("attempt-")), []).append(pickle.loads(path.read_bytes()))
    which = max(attempts, default=0) if attempt is None else attempt
    return sorted(attempts.get(which, []), key=lambda told: told.rank)


def _bring_home(folder: Path, found: list[retrofit.Retrofitted], began: float) -> Any:
    # Where machines came, torch counts no new attempt, and ranks that had to end may have left how they did.
    outcomes = [outcome for outcome in _outcomes(folder) if not outcome.failed]
    value = local.bring_home(outcomes, found, everybody=False)
    if outcomes[0].rank == 0:
        return value
    ranks = tuple(told.rank for told in outcomes)
    world_size, node_rank, host = json.loads(Path(folder, f"world.{ranks[0]}").read_text())
    return NodeSummary(node_rank, ranks, world_size, host, time.monotonic() - began)


def _raise_failure(folder: Path, error: Any, oom_kills: int | None) -> NoReturn:
    """Raise what has failed in the last attempt: the rank's own exception where it has left one."""
    _raise_what_ranks_told(folder)
    rank, first = error.get_first_failure()
    raise_failure([death(rank, first.pid, first.exitcode, oom_kills)])


def _raise_what_ranks_told(folder: Path) -> None:
    told = [outcome for outcome in _outcomes(folder) if outcome.failed]
    if told:
        raise_failure(told)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Give the caller back its signal handlers, variables and log levels, which torch's agent changes."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if main else {}
    environ = dict(os.environ)
    # A store of each round's own, so that a rank never reads what an earlier round has left.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    levels = {name: logging.getLogger(name).level for name in _loggers()}
    try:
        yield
    finally:
        for name in _loggers():
            logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environ)


def _hush() -> None:
    """Keep torch's agent from printing what is raised in the caller, or told by `say`."""
    if "LOGLEVEL" not in os.environ:
        for name in _loggers():
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _loggers() -> list[str]:
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    return [name for name in logging.root.manager.loggerDict if name.startswith(names)]
