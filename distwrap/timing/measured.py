"""What one rank has measured: its steps in blocks, of which there are never more than some thousand, and its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distwrap.stopwatch import Part, Row

_MOST_BLOCKS = 4096


@dataclass
class Blocks:
    """Rows of steps, in blocks of equally many; the same on ranks that have taken as many steps.

    Attributes:
        rows: seconds of each part in each complete block.
        steps: how many steps there are in a block.
        count: how many steps there were.
    """

    rows: list[Row] = field(default_factory=list)
    steps: int = 1
    count: int = 0
    _last: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a step."""
        self.count += 1
        self._last.append(row)
        if len(self._last) < self.steps:
            return
        self.rows.append(_sum(self._last))
        self._last = []
        if len(self.rows) == _MOST_BLOCKS:
            self.rows = [_sum(pair) for pair in zip(self.rows[::2], self.rows[1::2], strict=False)]
            self.steps *= 2


def _sum(rows: list[Row] | tuple[Row, ...]) -> Row:
    return [sum(column) for column in zip(*rows, strict=True)]


@dataclass(frozen=True)
class RankSettings:
    """Settings of a rank, which could be others; ``None`` where there is no such thing, or nobody knows.

    Attributes:
        cpus: the CPUs on which it may run.
        threads: with how many threads it computes.
        workers: of its loader.
        pins: whether its loader pins the memory of its batches.
        total_memory: bytes that its device has.
        bucket_bytes: how large a group of gradients DDP exchanges at a time.
        is_bucket_view: whether gradients are views of these groups, and not held twice.
        finds_unused: whether DDP looks at each step for parameters without a gradient.
        unused_bytes: of the parameters that had none at the last step.
        is_static: whether DDP takes each step's graph for the same.
    """

    cpus: int
    threads: int
    workers: int | None = None
    pins: bool | None = None
    total_memory: int | None = None
    bucket_bytes: int | None = None
    is_bucket_view: bool | None = None
    finds_unused: bool | None = None
    unused_bytes: int | None = None
    is_static: bool | None = None


@dataclass(frozen=True)
class RankTimes:
    """Figures that a rank has measured.

    Attributes:
        rank: its number.
        host: its node's name.
        device: its device, as torch names it.
        steps: how many steps were measured.
        steps_in_block: how many of them are in each row.
        rows: seconds of each `Part`, of each block.
        samples: how many samples its models trained on in a step, on average.
        process_memory: the most bytes that its process has held.
        device_memory: the most bytes that its tensors have held on the device; ``None`` on the CPU.
        gradient_bytes: of the gradients that are averaged in a step.
        collectives: how often the loop itself called each collective, in a step; also what waits for the device.
        settings: with which it ran.
    """

    rank: int
    host: str
    device: str
    steps: int
    steps_in_block: int
    rows: list[Row]
    samples: float
    process_memory: int
    device_memory: int | None
    gradient_bytes: int
    collectives: dict[str, float]
    settings: RankSettings

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> RankTimes:
        """Return what ``dataclasses.asdict`` has made a dict of."""
        return cls(**{**told, "settings": RankSettings(**told["settings"])})

    def mean(self) -> Row:
        """Return the seconds of each part in a step."""
        counted = len(self.rows) * self.steps_in_block
        return [sum(column) / counted for column in zip(*self.rows, strict=True)] if self.rows else [0.0] * len(Part)
