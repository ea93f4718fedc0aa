"""A trace of some steps by torch's profiler: a file a rank, which Perfetto opens together."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from distwrap._internals.torch import profiler_runs
from distwrap.errors import OptionError
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World, current_world, say
from distwrap.stopwatch import Part
from distwrap.timing import output_file
from distwrap.timing.recorder import Measuring
from distwrap.wording import named_ranks

_PREFIX = "distwrap: "  # of the names of parts in a trace
_TRACK = 1 << 30  # the number of a thread for the parts, greater than any of the system's

_OTHER_PROFILER = "trace(): torch's profiler is running already, and only one can run at a time."


@contextmanager
def trace(*, steps: range = range(3, 6), path: str | os.PathLike[str] = "trace.json") -> Iterator[None]:
    """Trace some steps of the loop within a ``with``, on all ranks, each into a file of its own.

    Every rank must enter and leave it. torch's profiler runs for these steps only. A file has the parts of a step
    beside the operators. Open the files of several ranks together in https://ui.perfetto.dev.

    Args:
        steps: a range of optimizer steps, counted from 0 when the ``with`` begins; the first steps also make buffers
            and connections.
        path: the file, before whose suffix each rank puts its number, as in ``trace.rank0.json``, and whose folder it
            makes; it is compressed if its name ends in ``.gz``.

    Raises:
        OptionError: the range has no step, a file cannot be written, or a trace or torch's profiler is running
            already; raised on every rank.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> folder = Path(tempfile.mkdtemp())
        >>> with trace(steps=range(1, 3), path=folder / "trace.json"):
        ...     for _ in range(4):
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        >>> "distwrap: backward" in (folder / "trace.rank0.json").read_text()
        True
    """
    if not isinstance(steps, range) or not steps or steps.step != 1 or steps.start < 0:
        raise OptionError(
            f"trace(steps={steps!r}): it must be a range of steps that follow each other, such as range(10, 13)."
        )
    if not isinstance(path, (str, os.PathLike)) or not Path(path).name or Path(path).is_dir():
        raise OptionError(f"trace(path={path!r}): it must be the path of a file.")
    world = current_world()
    tracer = world.part(_Tracer)
    if tracer.is_on:
        raise OptionError("trace(): a trace is being made already, by an outer trace().")
    path = Path(path).absolute()
    file = _of_rank(path, world.placement.rank)
    for problem in gather_object(_OTHER_PROFILER if profiler_runs() else output_file.problem(file)):
        if problem:
            raise OptionError(problem if problem == _OTHER_PROFILER else f"trace(path={os.fspath(path)!r}) {problem}")
    tracer.begin(steps, file)
    try:
        yield
        tracer.end()
    finally:
        tracer.close()
    ranks: list[tuple[int, str]] = gather_object((tracer.count, tracer.failure))
    fewest = min(taken for taken, _ in ranks)
    if fewest < steps.stop:
        which = named_ranks(rank for rank, (taken, _) in enumerate(ranks) if taken == fewest)
        wanted = f"{steps.start} to {steps.stop - 1}"
        say(f"trace(): not all of the steps {wanted} are there: the loop took {fewest} step(s) on {which}")
    for rank, (_, failure) in enumerate(ranks):
        if failure:
            say(f"trace(): the file of rank {rank} cannot be written: {failure}")
    if traced := [rank for rank, (taken, failure) in enumerate(ranks) if taken > steps.start and not failure]:
        files = _of_rank(path, traced[0] if len(traced) == 1 else "*")
        say(f"trace(): written to {files}; open it in https://ui.perfetto.dev")


def _of_rank(path: Path, rank: object) -> Path:
    """Return the file of a rank.

    Example:
        >>> _of_rank(Path("a.b/trace.json.gz"), 3).as_posix()
        'a.b/trace.rank3.json.gz'
    """
    suffixes = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])
    return path.with_name(f"{path.name.removesuffix(suffixes)}.rank{rank}{suffixes}")


class _Tracer(RunPart):
    """torch's profiler on this rank, for some steps.

    Attributes:
        is_on: whether steps are counted.
        count: how many steps there were.
        failure: why the file could not be written, or empty.
    """

    def __init__(self, world: World) -> None:
        self._world, self._measuring = world, world.part(Measuring)
        self.is_on, self._parts = False, ExitStack()  # of which one is open at a time
        self._profile: profile | None = None

    def begin(self, steps: range, file: Path) -> None:
        """Count steps from here, and trace some of them into a file."""
        self._steps, self._file, self.count, self.failure = steps, file, 0, ""
        self.is_on, self._watch = True, self._measuring.begin().stopwatch
        self._watch.on_step.append(self._step)
        self._begin_if_due()

    def end(self) -> None:
        """Write the trace of the steps until now."""
        running = self._profile
        if running is None or self.count <= self._steps.start:  # the loop has ended before
            return
        self._stop()
        with tempfile.TemporaryDirectory(prefix="distwrap-") as folder:
            raw = Path(folder, "trace.json")
            running.export_chrome_trace(str(raw))
            text = _named(raw.read_text(), self._world.placement.rank)
        try:
            with gzip.open(self._file, "wt", 6) if self._file.suffix == ".gz" else open(self._file, "w") as out:
                out.write(text)
        except OSError as error:  # the run has not failed
            self.failure = str(error)

    def close(self) -> None:
        """Stop tracing."""
        self._stop()
        if self.is_on:
            self._watch.on_step.remove(self._step)
            self.is_on = False
            self._measuring.end()

    def _step(self) -> None:
        self.count += 1
        if self.count == self._steps.stop:
            self.end()
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self.count == self._steps.start:
            if profiler_runs():  # two at a time crash
                raise OptionError(_OTHER_PROFILER)
            own = getattr(ProfilerActivity, self._world.device.type.upper(), ProfilerActivity.CPU)
            self._profile = profile(activities={ProfilerActivity.CPU, own})
            self._profile.start()
            self._watch.on_part.append(self._show)
            self._show(Part.OWN)

    def _show(self, part: Part) -> None:
        self._parts.close()
        self._parts.enter_context(record_function(f"{_PREFIX}{part.name.lower()}"))

    def _stop(self) -> None:
        if self._profile is not None:
            self._watch.on_part.remove(self._show)
            self._parts.close()
            self._profile.stop()
        self._profile = None


def _named(text: str, rank: int) -> str:
    """Return torch's trace with the rank in its name, and the parts of a step on a track of their own."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:  # torch does not escape quotes within names
        found = json.loads(re.sub(r'(?<="name": ").*?(?=",\s*"pid": )', lambda name: name[0].replace('"', "'"), text))
    events = [event for event in found["traceEvents"] if isinstance(event["pid"], int)]  # "Spans" are the profiler's
    of_rank = rank << 22  # more than any process has: devices, and processes of two containers, have equal numbers
    process, track = os.getpid() + of_rank, _TRACK + rank
    for event in events:
        event["pid"] += of_rank
        if event["name"] == "process_name" and event["pid"] == process:
            event["args"] = {"name": f"rank {rank} on {socket.gethostname()}"}
        # On an accelerator the profiler shows parts once more.
        if event["ph"] == "X" and event["name"].startswith(_PREFIX) and event["cat"] == "user_annotation":
            event["tid"] = track  # an operator may begin in one part and end in the next
    of_track = {"ph": "M", "pid": process, "tid": track, "ts": 0}
    events.append({**of_track, "name": "thread_name", "args": {"name": "parts of a step"}})
    events.append({**of_track, "name": "thread_sort_index", "args": {"sort_index": -1}})
    return json.dumps({**found, "traceEvents": events})
