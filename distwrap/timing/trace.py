"""A trace of some steps by torch's profiler: one file for Perfetto with the tracks of all ranks, on one clock."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from distwrap.errors import OptionError
from distwrap.group.collectives import gather_object
from distwrap.group.world import World, current_world, is_rank_zero, say
from distwrap.stopwatch import Part
from distwrap.timing.recorder import Measuring

_PREFIX = "distwrap: "  # of the names of parts in a trace
_TURNS = 9  # in which the ranks look at their clocks
_TRACKS, _IDS = 1000, 10**9  # of one rank, at most
_ARROWS = ("s", "t", "f")

Trace = dict[str, Any]


@contextmanager
def trace(*, steps: range = range(3, 6), path: str | os.PathLike[str] = "trace.json") -> Iterator[None]:
    """Trace some steps of the loop within a ``with``, on all ranks, into one file; every rank enters and leaves it.

    torch's profiler runs for these steps alone. A rank is a process in the file, with the parts of a step beside the
    operators, and arrows lead from the rank that came last to an exchange to those that waited for it. Open it in
    https://ui.perfetto.dev.

    Args:
        steps: optimizer steps, counted from 0 as the ``with`` begins; the first ones make buffers and connections.
        path: of the file, which rank 0 writes.

    Raises:
        OptionError: the steps are no range of at least one.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> path = Path(tempfile.mkdtemp()) / "trace.json"
        >>> with trace(steps=range(1, 3), path=path):
        ...     for _ in range(4):
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        >>> "distwrap: backward" in path.read_text()
        True
    """
    if not isinstance(steps, range) or not steps or steps.step != 1 or steps.start < 0:
        raise OptionError(f"trace(steps={steps!r}): it is a range of steps, as range(10, 13).")
    world = current_world()
    tracer = _Tracer(world, steps)
    try:
        yield
    finally:
        tracer.stop()
    traces = gather_object((socket.gethostname(), _offset(world), json.dumps(tracer.result)))
    if is_rank_zero():
        if tracer.result is None:
            say(
                f"trace(): the loop took {tracer.count} step(s), and none of {steps.start} to {steps.stop - 1}: no file"
            )
            return
        whole = merged([(host, offset, json.loads(text)) for host, offset, text in traces])
        Path(path).write_text(json.dumps(whole))


class _Tracer:
    """torch's profiler on this rank, for some steps.

    Attributes:
        result: the trace; ``None`` until it is there.
        count: how many steps there were.
    """

    def __init__(self, world: World, steps: range) -> None:
        self._world, self._steps = world, steps
        self.count, self.result = 0, None
        self._profile: profile | None = None
        self._shown: Any = None
        self._measuring = world.part(Measuring)
        self._watch = self._measuring.begin().stopwatch
        self._watch.on_step.append(self._step)
        self._begin_if_due()

    def stop(self) -> None:
        """Trace no more."""
        self._end()
        self._watch.on_step.remove(self._step)
        self._measuring.end()

    def _step(self) -> None:
        self.count += 1
        if self.count >= self._steps.stop:
            self._end()
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self.count == self._steps.start:
            own = getattr(ProfilerActivity, self._world.device.type.upper(), ProfilerActivity.CPU)
            self._profile = profile(activities={ProfilerActivity.CPU, own})
            self._profile.start()
            self._watch.on_part.append(self._show)
            self._show(Part.OWN)

    def _show(self, part: Part) -> None:
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
        self._shown = record_function(f"{_PREFIX}{part.name.lower()}")
        self._shown.__enter__()

    def _end(self) -> None:
        if self._profile is None:
            return
        self._watch.on_part.remove(self._show)
        self._shown.__exit__(None, None, None)
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="distwrap-") as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            self.result = json.loads(file.read_text())
        self._profile = self._shown = None


def _offset(world: World) -> float:
    """Return by how many seconds this rank's clock is ahead of rank 0's: all look at theirs as they leave a barrier."""
    looks = []
    for _ in range(_TURNS if world.placement.world_size > 1 else 0):
        dist.barrier()
        looks.append(time.time())
    return median(own - first for own, first in zip(looks, gather_object(looks)[0], strict=True)) if looks else 0.0


def merged(traces: list[tuple[str, float, Trace]]) -> Trace:
    """Return one trace out of those of all ranks.

    Args:
        traces: of each rank its host's name, by how many seconds its clock is ahead, and its trace.
    """
    ahead: dict[str, list[float]] = {}
    for host, offset, _ in traces:
        ahead.setdefault(host, []).append(offset)
    base = min(own["baseTimeNanoseconds"] for _, _, own in traces)
    events: list[dict[str, Any]] = []
    exchanges: list[list[tuple[dict[str, Any], float, float]]] = []
    for rank, (host, _, own) in enumerate(traces):
        shift = (own["baseTimeNanoseconds"] - base) / 1e3 - 1e6 * median(ahead[host])
        tracks: dict[Any, int] = {}
        mine = []
        for event in own["traceEvents"]:
            first = not tracks
            track = tracks.setdefault(event["pid"], rank * _TRACKS + len(tracks))
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank} on {host}" + ("" if first else f": {event['args']['name']}")}
            elif event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": track}
            event.update(pid=track, ts=event["ts"] + shift)
            if event["ph"] in _ARROWS:
                event["id"] += rank * _IDS
            events.append(event)
            if event.get("name") == f"{_PREFIX}exchange" and event["ph"] == "X":
                mine.append((event, event["ts"], event["ts"] + event["dur"]))
        exchanges.append(sorted(mine, key=lambda each: each[1]))
    return {**traces[0][2], "baseTimeNanoseconds": base, "traceEvents": events + _arrows(exchanges)}


def _arrows(exchanges: list[list[tuple[dict[str, Any], float, float]]]) -> list[dict[str, Any]]:
    """Return arrows from the rank that came last to each exchange to the others' ends of it."""
    arrows = []
    for number, together in enumerate(zip(*exchanges, strict=False)):
        last = max(range(len(together)), key=lambda rank: together[rank][1])
        for rank, (event, _, ends) in enumerate(together):
            if rank != last:
                one = len(exchanges) * _IDS + number * len(together) + rank
                name = {"name": "waits for the last rank", "cat": "exchange", "id": one}
                where = {key: together[last][0][key] for key in ("pid", "tid")}
                arrows.append({**name, **where, "ph": "s", "ts": together[last][1]})
                arrows.append({**name, "pid": event["pid"], "tid": event["tid"], "ph": "f", "bp": "e", "ts": ends})
    return arrows
