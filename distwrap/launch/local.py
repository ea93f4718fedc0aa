"""Launch ranks on this machine as processes of their own: fork, forkserver, spawn."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distwrap import retrofit
from distwrap.data import workers
from distwrap.devices.cpus import choose_threads
from distwrap.environments import Placement
from distwrap.errors import ForkError, MainGuardError, SerializationError
from distwrap.group.setup import ARRIVAL_SECONDS, import_before_group
from distwrap.group.world import RunOptions
from distwrap.launch import fork_safety, openmp, pickling, transport, worker
from distwrap.launch.execute import Call
from distwrap.launch.logs import Logs, Streams
from distwrap.launch.node_plan import NodePlan
from distwrap.launch.outcome import Outcome
from distwrap.launch.processes import CommandProcess, ForkedProcess, Process, ServedProcess, spawn_command, warm_server
from distwrap.launch.signals import PassedOn
from distwrap.launch.store_file import Meeting, meeting
from distwrap.launch.supervisor import print_where_all_are, stop, supervise
from distwrap.launch.worker import Assignment, Surroundings, Wanted

ONE = NodePlan()

Start = Callable[[int, list[Process]], Process]


def launch(
    call: Call,
    run: RunOptions,
    launcher: str,
    nprocs: int,
    *,
    everybody: bool,
    seconds: float | None = None,
    machines: NodePlan = ONE,
) -> Any:
    """Run the call on `nprocs` ranks here, and return rank 0's value, or the list of all.

    Args:
        call: what to run.
        run: how.
        launcher: ``"fork"``, ``"forkserver"`` or ``"spawn"``.
        nprocs: how many ranks.
        everybody: return every rank's value.
        seconds: how long it may take; ``None`` is as long as it likes.
        machines: which take part; where rank 0 is on another one, the value is a `NodeSummary`.
    """
    found = retrofit.find(call.args, call.kwargs) if run.retrofit else []
    threads = choose_threads(nprocs)
    if launcher == "fork":
        refusal = fork_safety.refusal()
        if refusal:
            raise ForkError(f"launcher='fork' is not safe here: {refusal}. Use launcher='forkserver' or 'spawn'.")
        import_before_group()  # once here, and not in every rank
        # Without the pause more than one thread would hang in the first large kernel.
        threads = threads if openmp.pause() else 1
        common = _assignment(launcher, run, threads)
    else:
        payload = transport.pack(call.function, call.args, call.kwargs)
        common = replace(
            _assignment(launcher, run, threads),
            surroundings=Surroundings.capture(),
            payload=payload,
            main_path=main_path(call, launcher, payload),
        )
    with PassedOn() as signals, meeting(machines, nprocs, min(run.timeout, ARRIVAL_SECONDS)) as met:
        logs = Logs(run.log_dir, met.ranks) if run.log_dir is not None else None
        try:
            start = _starter(launcher, call, logs)
            outcomes = _run(start, common, met, everybody=everybody, seconds=seconds, logs=logs, signals=signals)
        finally:
            if logs is not None:
                logs.close()
        if met.nodes is not None:
            met.nodes.finish()
    value = bring_home(outcomes, found, everybody and not machines.several)
    return value if met.nodes is None or met.nodes.node_rank == 0 else met.nodes.summary()


def _assignment(launcher: str, run: RunOptions, threads: int | None) -> Assignment:
    return Assignment(Placement(), launcher, "", run, threads)


def _starter(launcher: str, call: Call, logs: Logs | None) -> Start:
    def streams(rank: int) -> Streams | None:
        return None if logs is None else logs.streams(rank)

    if launcher == "fork":
        return lambda rank, earlier: ForkedProcess(rank, call, earlier, streams(rank))
    if launcher == "spawn":
        return lambda rank, earlier: CommandProcess(rank, spawn_command, streams=streams(rank))
    server = warm_server()
    return lambda rank, earlier: ServedProcess(rank, server, streams(rank))


def _run(
    start: Start,
    common: Assignment,
    met: Meeting,
    *,
    everybody: bool,
    seconds: float | None,
    logs: Logs | None,
    signals: PassedOn,
) -> list[Outcome]:
    sys.stdout.flush()
    sys.stderr.flush()
    processes: list[Process] = []
    try:
        for rank in met.ranks:
            processes.append(start(rank, processes))
    except BaseException:
        stop(processes, all_they_started=True)
        raise
    if logs is not None:
        logs.start()
    if met.nodes is not None:
        met.nodes.start()
    try:
        for process in processes:
            place = met.placement(process.rank)
            _send(
                process,
                replace(
                    common,
                    placement=place,
                    store=met.place,
                    value=wanted(place, everybody),
                    everybody=everybody and place.nnodes > 1,
                ),
            )
    except BaseException:
        stop(processes, all_they_started=True)
        raise
    signals.listen(processes, lambda: print_where_all_are(met.place, met.world_size))
    try:
        return supervise(
            processes, store=met.place, ranks=met.world_size, seconds=seconds, signals=signals, nodes=met.nodes
        )
    finally:
        workers.remove_what_is_left(met.place)


def wanted(place: Placement, everybody: bool) -> Wanted:
    """Say what a rank is to send home: the first of each machine what it trained, and rank 0 the value."""
    if place.rank == 0 or (everybody and place.nnodes == 1):
        return "own"
    return "trained" if place.local_rank == 0 else ""


def _send(process: Process, assignment: Assignment) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at birth; whoever waits will say so
        process.conn.send_bytes(pickle.dumps(assignment, pickle.HIGHEST_PROTOCOL))


def bring_home(outcomes: list[Outcome], found: list[retrofit.Retrofitted], everybody: bool) -> Any:
    """Unpack the value of the first rank, or all values, and write what was trained into the caller's objects."""
    own = [item.original for item in found]
    values = []
    for i, outcome in enumerate(outcomes if everybody else outcomes[:1]):
        assert outcome.value is not None
        value, states = transport.unpack_result(outcome.value, own)
        if i == 0:
            for item, state in zip(found, states, strict=True):
                item.load(state)
        values.append(value)
    return values if everybody else values[0]


def main_path(call: Call, launcher: str, payload: bytes) -> str | None:
    """The script that a rank must import first, where something goes by reference and lives in the script."""
    if pickling.by_value() or b"__main__" not in payload:
        return None
    path: str | None = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not os.path.exists(path):
        raise SerializationError(
            f"{call.name} or an argument is defined interactively, and launcher={launcher!r} sends things by name. "
            f"Install cloudpickle (pip install 'distwrap[notebook]') to send it by value."
        )
    return os.path.abspath(path)


def refuse_launch_while_importing(name: str) -> None:
    """Refuse a decorated call at the top level of a script that a rank is importing."""
    if worker.importing_main:
        raise MainGuardError(
            f"the script calls {name} at its top level, so every rank that imports the script would launch again. "
            f"Put the call under `if __name__ == '__main__':`, or install cloudpickle "
            f"(pip install 'distwrap[notebook]'), which makes the import unnecessary."
        )
