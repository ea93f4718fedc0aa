"""Measuring on this rank, for reports and traces, and what all ranks have measured together."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from distwrap.devices.cpus import allowed_cpus
from distwrap.devices.kinds import kind_of
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World
from distwrap.stopwatch import Part, Row, Stopwatch, clock_of
from distwrap.timing.instruments import Instruments

_MOST_KEPT = 2048


@dataclass
class Rows:
    """Rows of steps: their sum, and some of them, the same ones on ranks that have taken as many.

    Which are kept looks like chance, so that nothing that comes every so many steps falls between them.

    Attributes:
        total: seconds of each part in all steps.
        count: how many steps there were.
        kept: rows of single steps, by the step's number.
    """

    total: Row = field(default_factory=lambda: [0.0] * len(Part))
    count: int = 0
    kept: dict[int, Row] = field(default_factory=dict)
    _below: int = 1 << 32

    def add(self, row: Row) -> None:
        """Add a step."""
        self.count += 1
        self.total = [before + seconds for before, seconds in zip(self.total, row, strict=True)]
        if _scattered(self.count) >= self._below:
            return
        self.kept[self.count] = row
        if len(self.kept) > _MOST_KEPT:
            self._below //= 2
            self.kept = {number: kept for number, kept in self.kept.items() if _scattered(number) < self._below}


def _scattered(number: int) -> int:
    """Return a number below 2**32; those of numbers that follow each other lie evenly apart (Knuth, 6.4)."""
    return number * 2654435761 % (1 << 32)


@dataclass(frozen=True)
class RankTimes:
    """Figures that a rank has measured.

    Attributes:
        rank: its number.
        host: its node's name.
        device: its device, as torch names it.
        steps: how many steps were measured.
        total: seconds of each `Part` in all of them.
        kept: seconds of each `Part` in some single steps, by number.
        batches: on how many batches the ranks train at a time; fewer than there are ranks where these share some.
        samples: how many samples its models trained on in a step, on average.
        queued: seconds of a step in which it could have computed, and other programs had its CPUs; ``None`` where the
            system does not tell.
        process_memory: the most bytes that its process has held.
        device_memory: the most bytes that its tensors have held on the device; ``None`` on the CPU.
        gradient_bytes: of the gradients that are averaged in a step.
        cpus: on how many CPUs it may run.
        threads: with how many threads it computes.
        workers: of its loader; ``None`` if unknown.
        is_ddp: whether DDP averages the gradients of a model.
    """

    rank: int
    host: str
    device: str
    steps: int
    total: Row
    kept: dict[int, Row]
    batches: int
    samples: float
    queued: float | None
    process_memory: int
    device_memory: int | None
    gradient_bytes: int
    cpus: int
    threads: int
    workers: int | None
    is_ddp: bool

    def mean(self) -> Row:
        """Return the seconds of each part in a step."""
        return [seconds / max(1, self.steps) for seconds in self.total]


class Measuring(RunPart):
    """The stopwatch of a run and its instruments, which are in place as long as a report or a trace uses them.

    Attributes:
        has_report: whether a report uses them.
    """

    has_report = False

    def __init__(self, world: World) -> None:
        self._world, self._wanted = world, 0
        self._instruments: Instruments | None = None

    def begin(self) -> Instruments:
        """Return the instruments, from now on in their places."""
        if self._instruments is None:
            self._instruments = Instruments(self._world, Stopwatch(clock_of(self._world.device)))
            self._instruments.place()
        self._wanted += 1
        return self._instruments

    def end(self) -> None:
        """Take the instruments away, unless another report or trace uses them."""
        self._wanted -= 1
        if not self._wanted:
            self.close()

    def close(self) -> None:
        """Take the instruments away, also where the run failed."""
        if self._instruments is not None:
            self._instruments.take_away()
        self._instruments, self._wanted = None, 0

    @contextmanager
    def report(self) -> Iterator[Callable[[], list[RankTimes]]]:
        """Measure within a ``with``, for a report.

        Yields:
            A function that returns what all ranks have measured until it is called; every rank must call it.
        """
        instruments, rows, device = self.begin(), Rows(), self._world.device
        self.has_report = True
        instruments.count_from_here()
        instruments.stopwatch.on_row.append(rows.add)

        def measured() -> list[RankTimes]:
            kind_of(device).finish(device)
            instruments.stopwatch.settle()
            instruments.look()
            return [RankTimes(**sent) for sent in gather_object(asdict(self._measured(instruments, rows)))]

        try:
            yield measured
        finally:
            instruments.stopwatch.on_row.remove(rows.add)
            self.has_report = False
            self.end()

    def _measured(self, instruments: Instruments, rows: Rows) -> RankTimes:
        device = self._world.device
        steps, queued = max(1, rows.count), instruments.queued_share()
        return RankTimes(
            rank=self._world.placement.rank,
            host=socket.gethostname(),
            device=str(device),
            steps=rows.count,
            total=rows.total,
            kept=rows.kept,
            batches=self._world.layout.size,
            samples=instruments.samples / steps,
            queued=None if queued is None else queued * sum(rows.total) / steps,
            process_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            device_memory=kind_of(device).peak_memory(device),
            gradient_bytes=instruments.gradient_bytes,
            cpus=len(allowed_cpus()),
            threads=torch.get_num_threads(),
            workers=instruments.workers,
            is_ddp=instruments.is_ddp,
        )
