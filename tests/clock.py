"""A clock for tests of what waits: its time passes as somebody sleeps by it, and takes none."""

from __future__ import annotations


class FastClock:
    """Clock whose sleepers wake at once, later.

    Attributes:
        now: seconds since some moment.
        computed: seconds for which this process has computed.
    """

    def __init__(self) -> None:
        self.now, self.computed = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.computed

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds
