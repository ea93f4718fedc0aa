"""Times of several ways to do the same, taken in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclass(frozen=True)
class Samples:
    """Seconds that one way took, a number for each round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        """The middle number, which a few disturbed rounds do not move."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The number of the least disturbed round."""
        return min(self.seconds)

    def text(self, unit: str) -> str:
        """Write median (min-max)."""
        low, middle, high = (_digits(UNITS[unit] * x) for x in (self.best, self.median, max(self.seconds)))
        return f"{middle} ({low}-{high}) {unit}"

    def over(self, other: Samples) -> float:
        """Return the median of the ratios, round by round: what slows a round down slows both down."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))

    def above(self, other: Samples) -> float:
        """Return the median of the differences, round by round, in seconds."""
        return statistics.median(a - b for a, b in zip(self.seconds, other.seconds, strict=True))


def _digits(number: float) -> str:
    """Write three digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Samples]:
    """Run every way once a round, forwards and backwards in turn, so that a slow minute is shared by all.

    Args:
        ways: functions by name; each returns the seconds it took.
        rounds: how often each one runs.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(ways[name]())
    return {name: Samples(seconds) for name, seconds in taken.items()}


def per_call(body: Callable[[], object], calls: int) -> Callable[[], float]:
    """Make a way for `in_turns` out of something too short to time alone: seconds a call, over that many calls."""

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            body()
        return (time.perf_counter() - start) / calls

    return timed
