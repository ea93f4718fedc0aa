"""The figures of all ranks taken together: what a step costs, what bounds it, and for whom the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from distwrap.stopwatch import Part, Row
from distwrap.timing.measured import RankTimes

WORTH_TELLING = 0.03  # of a step
_NEAR = 0.25  # of the way from the slowest rank to the mean, within which a rank is slow too


@dataclass(frozen=True)
class Lag:
    """Ranks for which the others wait.

    Attributes:
        ranks: which they are; all of them where they take turns.
        share: of a step, which the others wait for them.
        part: in which they are slower than the others.
        slower: by how much that part is longer than the others', in seconds a step.
        usual: how long it is on the others, in seconds a step.
        takes_turns: whether it is another rank at each step.
    """

    ranks: list[int]
    share: float
    part: Part
    slower: float
    usual: float
    takes_turns: bool


@dataclass(frozen=True)
class Analysis:
    """Figures of all ranks, taken together.

    Attributes:
        ranks: what each has measured.
        step: seconds of a step.
        parts: seconds of each part in a step, the mean over the ranks.
        link: seconds of a step in which even the last rank waits: for the network, and not for others.
        waiting: seconds of a step that a rank waits for others, the mean over the ranks.
        alone: seconds of a step that one rank alone is predicted to take.
        lags: for whom the others wait, where it is worth telling.
    """

    ranks: list[RankTimes]
    step: float
    parts: Row
    link: float
    waiting: float
    alone: float
    lags: list[Lag]

    @property
    def efficiency(self) -> float:
        """Share of a step in which a rank does what it would do alone."""
        return self.alone / self.step if self.step else 1.0

    @property
    def speedup(self) -> float:
        """Samples a second, of those of one rank alone."""
        return self.efficiency * len(self.ranks)

    @property
    def by_number(self) -> dict[int, RankTimes]:
        """Figures of each rank, by its number."""
        return {rank.rank: rank for rank in self.ranks}

    @property
    def steps(self) -> int:
        """Number of steps that were measured."""
        return min(rank.steps for rank in self.ranks)

    @property
    def samples_a_second(self) -> float:
        """Samples of all ranks in a second."""
        return sum(rank.samples for rank in self.ranks) / self.step if self.step else 0.0


def analysed(ranks: Sequence[RankTimes]) -> Analysis:
    """Take the figures of all ranks together.

    Example:
        >>> from distwrap.timing.measured import RankSettings
        >>> def rank(number: int, forward: float, exchange: float) -> RankTimes:
        ...     row = [0.0, forward, 0.0, exchange, 0.0, 0.0, 0.0, 0.0]
        ...     return RankTimes(number, "host", "cpu", 2, 1, [row, row], 8.0, 0, None, 0, {}, RankSettings(1, 1))
        >>> found = analysed([rank(0, 0.1, 0.3), rank(1, 0.3, 0.1)])
        >>> round(found.step, 3), round(found.link, 3), round(found.waiting, 3)
        (0.4, 0.1, 0.1)
        >>> [(lag.ranks, lag.part.name, round(lag.share, 3)) for lag in found.lags]
        [([1], 'FORWARD', 0.5)]
    """
    means = [rank.mean() for rank in ranks]
    parts = [sum(column) / len(means) for column in zip(*means, strict=True)]
    step = sum(parts)
    busy = [sum(row) - row[Part.EXCHANGE] for row in means]
    waits = _waits(ranks)
    link = sum(min(block) for block in waits) / len(waits) if waits else 0.0
    waiting = max(0.0, parts[Part.EXCHANGE] - link)
    lags = _lags(ranks, means, waits, step) if len(ranks) > 1 and waits and step else []
    return Analysis(list(ranks), step, parts, link, waiting, median_low(busy), lags)


def _waits(ranks: Sequence[RankTimes]) -> list[list[float]]:
    """Return how long each rank waited for the exchange, a step, in each block that all of them have."""
    size = max(rank.steps_in_block for rank in ranks)
    columns = [[row[Part.EXCHANGE] / size for row in rank.rows] for rank in ranks if rank.steps_in_block == size]
    return [list(block) for block in zip(*columns, strict=False)] if len(columns) == len(ranks) else []


def _lags(ranks: Sequence[RankTimes], means: list[Row], waits: list[list[float]], step: float) -> list[Lag]:
    """Return for whom the others wait, longest first: for the same ranks all along, and for another at each step."""
    count = len(ranks)
    waited = [sum(column) / len(waits) for column in zip(*waits, strict=True)]
    least = min(waited)
    steady = sum(waited) / count - least
    in_turns = sum(sum(block) / count - min(block) for block in waits) / len(waits) - steady
    found = []
    slow = [index for index, wait in enumerate(waited) if wait <= least + _NEAR * steady]
    others = [index for index in range(count) if index not in slow]
    if others:
        share = sum(waited[index] - least for index in others) / len(others) / step
        where = _where_they_differ([means[index] for index in slow], [means[index] for index in others])
        found.append(Lag([ranks[index].rank for index in slow], share, *where, takes_turns=False))
    # Of ranks that take turns all wait but one.
    share = in_turns * count / (count - 1) / step
    found.append(Lag([rank.rank for rank in ranks], share, *_where_it_varies(ranks), takes_turns=True))
    return sorted((lag for lag in found if lag.share >= WORTH_TELLING), key=lambda lag: -lag.share)


def _where_they_differ(slow: list[Row], others: list[Row]) -> tuple[Part, float, float]:
    """Return the part in which slow ranks lose most against the others, by how much, and how long it is on those."""
    found = []
    for part in Part:
        if part is not Part.EXCHANGE:
            usual = median(row[part] for row in others)
            found.append((median(row[part] for row in slow) - usual, part, usual))
    slower, part, usual = max(found)
    return part, slower, usual


def _where_it_varies(ranks: Sequence[RankTimes]) -> tuple[Part, float, float]:
    """Return the part that is longest on another rank at each step, by how much it is, and how long it is."""
    size = ranks[0].steps_in_block
    found = []
    for part in Part:
        if part is not Part.EXCHANGE:
            blocks = [
                list(block) for block in zip(*([row[part] / size for row in rank.rows] for rank in ranks), strict=False)
            ]
            usual = sum(map(sum, blocks)) / len(ranks) / len(blocks)
            found.append((sum(max(block) for block in blocks) / len(blocks) - usual, part, usual))
    slower, part, usual = max(found)
    return part, slower, usual
