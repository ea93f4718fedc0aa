"""A trace of some steps by torch's profiler: one file for Perfetto with the tracks of all ranks, on one clock."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from distwrap._internals.torch_profiler import profiler_runs
from distwrap.environments.identity import node
from distwrap.errors import OptionError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import RunPart, World, current_world, is_rank_zero, say
from distwrap.stopwatch import Part, Stopwatch
from distwrap.timing import output_file
from distwrap.timing.recorder import Measuring
from distwrap.wording import named_ranks

_PREFIX = "distwrap: "  # of the names of parts in a trace
_EXCHANGE = f"{_PREFIX}{Part.EXCHANGE.name.lower()}"
_TURNS = 9  # in which the ranks look at their clocks
_TRACKS, _IDS = 1000, 10**9  # of one rank, at most
_ARROW_IDS = 10**15  # of the arrows between ranks
_ARROWS = ("s", "t", "f")
_PARTS = 1 << 30  # of rank 0: the number of a thread for the parts, greater than any of the system's

_OTHER_PROFILER = "trace(): torch's profiler is running already, and only one can run at a time."

Event = dict[str, Any]


@contextmanager
def trace(*, steps: range = range(3, 6), path: str | os.PathLike[str] = "trace.json") -> Iterator[None]:
    """Trace some steps of the loop within a ``with``, on all ranks, into one file; every rank must enter and leave it.

    torch's profiler runs for these steps only. In the file each rank is a process, with the parts of a step beside the
    operators, and arrows lead from the rank that came last to an exchange to the ranks that waited for it. Open the
    file in https://ui.perfetto.dev.

    Args:
        steps: a range of optimizer steps, counted from 0 when the ``with`` begins; the first steps also make buffers
            and connections.
        path: the file, which rank 0 writes, and whose folder it makes; it is compressed if its name ends in ``.gz``.

    Raises:
        OptionError: the range has no step, the file cannot be written, or a trace or torch's profiler is running
            already; raised on every rank.

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
        raise OptionError(
            f"trace(steps={steps!r}): it must be a range of steps that follow each other, such as range(10, 13)."
        )
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"trace(path={path!r}): it must be the path of a file.")
    world = current_world()
    tracer = world.part(_Tracer)
    if tracer.is_on:
        raise OptionError("trace(): a trace is being made already, by an outer trace().")
    file = Path(path).absolute()
    if any(gather_object(profiler_runs())):
        raise OptionError(_OTHER_PROFILER)
    if problem := gather_object(output_file.problem(file) if is_rank_zero() else "")[0]:
        raise OptionError(f"trace(path={os.fspath(path)!r}) {problem}")
    tracer.begin(steps)
    try:
        yield
        tracer.end()
    finally:
        tracer.close()
    here = (tracer.count, bool(tracer.result), socket.gethostname(), node().partition(" ")[0], _ahead(world))
    ranks = [RankTrace(rank, *of_rank) for rank, of_rank in enumerate(gather_object(here))]
    traces = (broadcast(tracer.result, src=each.rank) for each in ranks if each.is_there)  # never all in memory
    if is_rank_zero():
        try:
            _write(file, steps, ranks, traces)
        except OSError as error:  # the run has not failed
            say(f"trace(): the file cannot be written: {error}")
    deque(traces, maxlen=0)  # of the other ranks, and what could not be written
    tracer.result = b""


class RankTrace(NamedTuple):
    """Description of the trace of a rank.

    Attributes:
        rank: its number.
        taken: how many steps its loop took.
        is_there: whether its loop has come to the steps that were to be traced.
        host: name of its host.
        clock: name of the node whose clock it was traced by.
        ahead: by how many seconds that clock is ahead of rank 0's, as this rank has measured it.
    """

    rank: int
    taken: int
    is_there: bool
    host: str
    clock: str
    ahead: float


def _write(file: Path, steps: range, ranks: list[RankTrace], traces: Iterator[bytes]) -> None:
    """Write the traces of all ranks that have one, and say what is missing."""
    wanted = f"{steps.start} to {steps.stop - 1}"
    traced = [each for each in ranks if each.is_there]
    if not traced:
        taken = f"the loop took {ranks[0].taken} step(s), counted from 0"
        say(f"trace(): no file is written: {taken}, and none of {wanted}")
        return
    fewest = min(ranks, key=lambda each: each.taken)
    if fewest.taken < steps.stop:
        which = named_ranks(each.rank for each in ranks if each.taken == fewest.taken)
        say(f"trace(): not all of {wanted} are in {file.name}: the loop took {fewest.taken} step(s) on {which}")
    with gzip.open(file, "wt", 6) if file.suffix == ".gz" else open(file, "w") as out:
        for text in merged(traced, traces):
            out.write(text)
    say(f"trace(): {file} was written; open it in https://ui.perfetto.dev")


class _Tracer(RunPart):
    """torch's profiler on this rank, for some steps.

    Attributes:
        result: the trace, packed; empty where there is none.
        count: how many steps there were.
    """

    def __init__(self, world: World) -> None:
        self._world, self._measuring = world, world.part(Measuring)
        self._steps, self.count, self.result = range(0), 0, b""
        self._watch: Stopwatch | None = None
        self._profile: profile | None = None
        self._shown: Any = None

    @property
    def is_on(self) -> bool:
        """Whether steps are counted."""
        return self._watch is not None

    def begin(self, steps: range) -> None:
        """Count steps from here, and trace some of them."""
        self._steps, self.count, self.result = steps, 0, b""
        self._watch = self._measuring.begin().stopwatch
        self._watch.on_step.append(self._step)
        self._begin_if_due()

    def end(self) -> None:
        """Keep the trace of the steps until now."""
        running = self._profile
        if running is None or self.count <= self._steps.start:  # the loop has ended before
            return
        self._stop()
        with tempfile.TemporaryDirectory(prefix="distwrap-") as folder:
            file = Path(folder, "trace.json")
            running.export_chrome_trace(str(file))
            self.result = zlib.compress(file.read_bytes(), 1)

    def close(self) -> None:
        """Stop tracing."""
        self._stop()
        if self._watch is not None:
            self._watch.on_step.remove(self._step)
            self._watch = None
            self._measuring.end()

    def _step(self) -> None:
        self.count += 1
        if self.count == self._steps.stop:
            self.end()
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self.count == self._steps.start and self._watch is not None:
            if profiler_runs():  # two at a time crash
                raise OptionError(_OTHER_PROFILER)
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

    def _stop(self) -> None:
        if self._profile is not None and self._watch is not None:
            self._watch.on_part.remove(self._show)
            self._shown.__exit__(None, None, None)
            self._profile.stop()
        self._profile = self._shown = None


def _ahead(world: World) -> float:
    """Return by how many seconds this rank's clock is ahead of rank 0's: all look at theirs as they leave a barrier."""
    looks = []
    for _ in range(_TURNS if world.placement.world_size > 1 else 0):
        world.barrier()
        looks.append(time.time())
    return median(own - first for own, first in zip(looks, gather_object(looks)[0], strict=True)) if looks else 0.0


def merged(ranks: list[RankTrace], traces: Iterable[bytes]) -> Iterator[str]:
    """Yield one trace, piece by piece, out of those of several ranks.

    Args:
        ranks: what they are.
        traces: theirs, as torch writes them, and compressed.
    """
    ahead: dict[str, list[float]] = {}
    for each in ranks:
        ahead.setdefault(each.clock, []).append(each.ahead)
    base, exchanges = None, []
    for of_rank, packed in zip(ranks, traces, strict=True):
        own = _read(zlib.decompress(packed).decode())
        events = own.pop("traceEvents")
        if base is None:
            base = own["baseTimeNanoseconds"]
            yield f'{json.dumps(own)[:-1]}, "traceEvents": ['
        else:
            yield ",\n"
        shift = (own["baseTimeNanoseconds"] - base) / 1e3 - 1e6 * median(ahead[of_rank.clock])
        mine = _moved(of_rank, events, shift)
        exchanges.append([event for event in mine if _is_part(event) and event["name"] == _EXCHANGE])
        yield _listed(mine)
    if arrows := _arrows(exchanges):
        yield f",\n{_listed(arrows)}"
    yield "]}"


def _read(text: str) -> Event:
    """Return the trace that torch has written, in which quotes within names are not escaped."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = json.loads(re.sub(r'(?<="name": ").*?(?=",\s*"pid": )', lambda name: name[0].replace('"', "'"), text))
    return dict(found)


def _listed(events: list[Event]) -> str:
    return json.dumps(events, separators=(",", ":"))[1:-1]


def _is_part(event: Event) -> bool:
    """Return whether an event is a part of a step: on an accelerator the profiler shows these once more."""
    return bool(event["ph"] == "X" and event["name"].startswith(_PREFIX) and event["cat"] == "user_annotation")


def _moved(of_rank: RankTrace, events: list[Event], shift: float) -> list[Event]:
    """Return a rank's events with numbers that no other rank's have, later by some microseconds."""
    rank, name = of_rank.rank, f"rank {of_rank.rank} on {of_rank.host}"
    tracks: dict[int, int] = {}
    events = [event for event in events if isinstance(event["pid"], int)]  # "Spans" are the profiler's of itself
    for event in events:
        first = not tracks
        track = tracks.setdefault(event["pid"], rank * _TRACKS + len(tracks))
        if event["name"] == "process_name":
            event["args"] = {"name": name if first else f"{name}: {event['args']['name']}"}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": track}
        event.update(pid=track, ts=event["ts"] + shift)
        if event["ph"] in _ARROWS:
            event["id"] += rank * _IDS
        if _is_part(event):  # a track of its own: an operator may begin in one and end in the next
            event["tid"] = _PARTS + rank
    of_track = {"ph": "M", "pid": rank * _TRACKS, "tid": _PARTS + rank}
    return [
        {**of_track, "name": "thread_name", "args": {"name": "parts of a step"}},
        {**of_track, "name": "thread_sort_index", "args": {"sort_index": -1}},
        *sorted(events, key=lambda event: float(event["ts"])),
    ]


def _arrows(exchanges: list[list[Event]]) -> list[Event]:
    """Return arrows from the rank that came last to each exchange to the others' ends of it."""
    arrows: list[Event] = []
    if len(set(map(len, exchanges))) > 1:  # some rank has stopped before, or has exchanged among some ranks alone
        return arrows
    for together in zip(*exchanges, strict=True):
        last = max(together, key=lambda event: float(event["ts"]))
        for event in together:
            ends = event["ts"] + 0.999 * event["dur"]  # at its very end an arrow would point to what comes next
            # The last sends its share shortly before its part begins; in a window of `accumulate` nobody waits.
            if event is not last and last["ts"] - ends < event["dur"]:
                begins = min(last["ts"], event["ts"] + 0.998 * event["dur"])
                one = {"name": "waits for the last rank", "cat": "exchange", "id": _ARROW_IDS + len(arrows)}
                arrows.append({**one, "ph": "s", "pid": last["pid"], "tid": last["tid"], "ts": begins})
                arrows.append({**one, "ph": "f", "bp": "e", "pid": event["pid"], "tid": event["tid"], "ts": ends})
    return arrows
