"""Measurements of one rank: the sum of its steps, some single steps, and its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distwrap.stopwatch import Part, Row

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
class RankSettings:
    """Settings of a rank that the user could change; ``None`` for one that does not exist or is unknown.

    Attributes:
        cpus: the CPUs on which it may run.
        threads: with how many threads it computes.
        processor: the name of what computes: the device, or the CPU.
        workers: of its loader.
        is_ddp: whether DDP averages the gradients of a model.
    """

    cpus: int
    threads: int
    processor: str | None = None
    workers: int | None = None
    is_ddp: bool = False


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
        unevenness: the standard deviation of the number of elements in a model's batches, as a share of the mean; of
            several models, where it is largest.
        queued: seconds of a step in which it could have computed, and other programs had its CPUs; ``None`` where the
            system does not tell.
        process_memory: the most bytes that its process has held.
        device_memory: the most bytes that its tensors have held on the device; ``None`` on the CPU.
        gradient_bytes: of the gradients that are averaged in a step.
        waiting_calls: how often in a step the loop itself called each function that waits for ranks.
        settings: with which it ran.
    """

    rank: int
    host: str
    device: str
    steps: int
    total: Row
    kept: dict[int, Row]
    batches: int
    samples: float
    unevenness: float
    queued: float | None
    process_memory: int
    device_memory: int | None
    gradient_bytes: int
    waiting_calls: dict[str, float]
    settings: RankSettings

    @classmethod
    def from_dict(cls, sent: dict[str, Any]) -> RankTimes:
        """Return the figures of a dict from ``dataclasses.asdict``, as ranks without a secret send them."""
        return cls(**{**sent, "settings": RankSettings(**sent["settings"])})

    def mean(self) -> Row:
        """Return the seconds of each part in a step."""
        return [seconds / max(1, self.steps) for seconds in self.total]
