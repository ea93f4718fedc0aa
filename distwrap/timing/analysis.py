"""The figures of all ranks taken together: what a step costs, what bounds it, and for whom the others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from distwrap.stopwatch import Part, Row
from distwrap.timing.recorder import RankTimes

_WORTH_TELLING = 0.03  # of a step
_NEAR = 0.25  # of the way from the slowest rank to the mean, within which a rank is slow too


@dataclass(frozen=True)
class Lag:
    """Ranks for which the others wait.

    Attributes:
        ranks: the numbers of these ranks; all ranks if a different one is late at each step.
        share: the share of a step that the others wait for them.
        part: the part of a step in which they are slower than the others.
        slower: the seconds of a step by which that part takes longer than on the others.
        usual: the seconds of a step that the part takes on the others.
        takes_turns: whether a different rank is late at each step.
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
        ranks: the figures of each rank.
        step: the seconds of a step.
        parts: the seconds of each part in a step, as the mean over the ranks.
        link: the seconds of a step that a rank waits for the exchange itself, and not for ranks that come later.
        waiting: the seconds of a step that a rank waits for others, as the mean over the ranks.
        alone: the predicted seconds of a step of one rank alone, with one batch.
        lags: the ranks for which the others wait, if that is worth telling.
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
        """Speed, as a share of that of equally many ranks that never wait and exchange nothing."""
        return self.speedup / len(self.ranks)

    @property
    def speedup(self) -> float:
        """Samples a second, as a multiple of those of one rank alone."""
        return self.ranks[0].batches * self.alone / self.step if self.step else float(len(self.ranks))

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
        >>> def rank(number: int, forward: float, exchange: float) -> RankTimes:
        ...     row = [0.0, forward, 0.0, exchange, 0.0, 0.0, 0.0, 0.0]
        ...     return RankTimes(number, "host", "cpu", 1, row, {1: row}, 2, 8.0, None, 0, None, 0, 1, 1, 0, False)
        >>> found = analysed([rank(0, 0.1, 0.3), rank(1, 0.3, 0.1)])
        >>> round(found.step, 3), round(found.link, 3), round(found.waiting, 3)
        (0.4, 0.1, 0.1)
        >>> [(lag.ranks, lag.part.name, round(lag.share, 3)) for lag in found.lags]
        [([1], 'FORWARD', 0.5)]
    """
    means = [rank.mean() for rank in ranks]
    parts = [sum(column) / len(means) for column in zip(*means, strict=True)]
    step = sum(parts)
    together = [[rank.kept[number] for rank in ranks] for number in _common(ranks)]
    waits = sum(row[Part.EXCHANGE] for rows in together for row in rows)
    waiting = parts[Part.EXCHANGE] * sum(map(_waited_for_others, together)) / waits if waits else 0.0
    lags = []
    if len(ranks) > 1 and step:
        lags = [lag for lag in (_always_late(ranks, means, step), _late_in_turns(ranks, together, step)) if lag]
    lags = sorted(
        (lag for lag in lags if lag.share >= _WORTH_TELLING and lag.slower > 0),  # else no part shows why
        key=lambda lag: -lag.share,
    )
    link = max(0.0, parts[Part.EXCHANGE] - waiting)  # never below, by what is lost in rounding
    return Analysis(list(ranks), step, parts, link, waiting, _alone(ranks, means), lags)


def _alone(ranks: Sequence[RankTimes], means: list[Row]) -> float:
    """Return the seconds of a step of one rank alone.

    It would evaluate as often in an epoch, which has more steps then, and do the work of all ranks that share a batch.
    """
    columns: list[tuple[float, ...]] = list(zip(*means, strict=True))
    alone = [median_low(columns[part]) for part in Part if part not in (Part.EXCHANGE, Part.EVALUATION)]
    seconds = sum(alone) + sum(columns[Part.EVALUATION]) / len(means)
    # Where each rank is quick in another part, the middle of all parts is slower than any rank.
    return min(seconds, max(map(_busy, means))) * len(ranks) / ranks[0].batches


def _common(ranks: Sequence[RankTimes]) -> list[int]:
    """Return the numbers of the steps whose figures every rank has kept."""
    return sorted(set.intersection(*(set(rank.kept) for rank in ranks)))


def _always_late(ranks: Sequence[RankTimes], means: list[Row], step: float) -> Lag | None:
    """Return the ranks for which the others wait all along."""
    waits = [row[Part.EXCHANGE] for row in means]
    limit = min(waits) + _NEAR * (sum(waits) / len(waits) - min(waits))
    slow = [index for index, wait in enumerate(waits) if wait <= limit]
    others = [index for index, wait in enumerate(waits) if wait > limit]
    if not others:
        return None
    waited = sum(waits[index] for index in others) / len(others) - min(waits)
    busier = sum(map(_busy, (means[index] for index in slow))) / len(slow)
    busier -= sum(map(_busy, (means[index] for index in others))) / len(others)

    def lost(part: Part) -> tuple[float, float]:
        late, usual = (median(means[index][part] for index in some) for some in (slow, others))
        return late - usual, usual

    # What they wait beyond the time that the slow ranks were busy longer is the exchange's own.
    share = min(waited, busier) / step
    # Ranks that take fewer steps, and then wait for the others' (Join), have longer ones.
    return Lag([ranks[index].rank for index in slow], min(1.0, share), *_worst(lost), takes_turns=False)


def _late_in_turns(ranks: Sequence[RankTimes], together: list[list[Row]], step: float) -> Lag | None:
    """Return the seconds that the ranks wait if a different one is late at each step, when all others wait."""
    if not together:
        return None
    waited = _by_turns([[-row[Part.EXCHANGE] for row in rows] for rows in together])
    busier = _by_turns([[_busy(row) for row in rows] for rows in together])
    share = min(waited, busier) * len(ranks) / (len(ranks) - 1) / step

    def lost(part: Part) -> tuple[float, float]:
        steps = [[row[part] for row in rows] for rows in together]
        return _by_turns(steps), sum(map(sum, steps)) / len(steps[0]) / len(steps)

    return Lag([rank.rank for rank in ranks], min(1.0, share), *_worst(lost), takes_turns=True)


def _waited_for_others(rows: list[Row]) -> float:
    """Return how long the ranks waited for those that were busy for longer, in one step, all together."""
    least, longest = min(row[Part.EXCHANGE] for row in rows), max(map(_busy, rows))
    return sum(min(row[Part.EXCHANGE] - least, longest - _busy(row)) for row in rows)


def _busy(row: Row) -> float:
    return sum(row) - row[Part.EXCHANGE]


def _by_turns(steps: list[list[float]]) -> float:
    """Return by how much the largest of each step is above the mean, beyond what is largest all along."""
    count = len(steps[0])
    whole: float = sum(max(step) - sum(step) / count for step in steps) / len(steps)
    overall = [sum(column) / len(steps) for column in zip(*steps, strict=True)]
    steady: float = max(overall) - sum(overall) / count
    return whole - steady


def _worst(of: Callable[[Part], tuple[float, float]]) -> tuple[Part, float, float]:
    """Return the part in which most time is lost, by a function of its lost and usual seconds, and these."""
    (slower, usual), part = max((of(part), part) for part in Part if part is not Part.EXCHANGE)
    return part, slower, usual
