"""A run in which no rank moves is found out, and one in which a single rank moves is not: by a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from distwrap.environments import Placement
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import TICK_SECONDS, Channel
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.observer import COLLECTIVE_SECONDS, Observer
from distwrap.supervision.waits import MainThread
from tests.clock import FastClock

TIMEOUT = 30.0
RANKS = 3


class Run:
    """Ranks of one run, each with an observer that looks four times a second.

    Attributes:
        lines: where the main thread of each rank is.
        cpu: the part of a core that each rank's process uses.
        found: for each time that a rank has found the run stalled, the rank and the seconds since the begin.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = HashStore()
        self.clocks = [FastClock() for _ in range(RANKS)]
        self.lines, self.cpu = [0] * RANKS, [0.0] * RANKS
        self.found: list[tuple[int, float]] = []
        self._rank, frame = 0, SimpleNamespace(f_code=SimpleNamespace(co_filename="train.py"), f_back=None)

        def stand() -> Any:
            frame.f_lasti = self.lines[self._rank]
            return frame

        monkeypatch.setattr(stacks, "frame_of", stand)
        self.activities = [Activity(None) for _ in range(RANKS)]
        threads = [MainThread(*each) for each in zip(self.activities, self.clocks, strict=True)]
        silent: Any = None  # as no notice is asked for
        self.observers = [
            Observer(store, Placement(rank, RANKS), silent, thread, 0.0, TIMEOUT, clock)
            for rank, (thread, clock) in enumerate(zip(threads, self.clocks, strict=True))
        ]

    def go_on(self, seconds: float, work: Callable[[], object] = lambda: None) -> None:
        """Let time pass, and let the ranks do some work between two looks."""
        for _ in range(int(seconds / TICK_SECONDS)):
            work()
            for rank, (observer, clock) in enumerate(zip(self.observers, self.clocks, strict=True)):
                self._rank = rank
                clock.sleep(TICK_SECONDS)
                clock.computed += self.cpu[rank] * TICK_SECONDS
                if observer.look():
                    self.found.append((rank, clock.now - 1000.0))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_run_in_which_no_rank_moves(run: Run) -> None:
    """Once the limit has passed, and a second for a collective to say so itself, one rank finds it, and once."""
    run.go_on(10 * TIMEOUT)
    [(rank, seconds)] = run.found
    assert rank == RANKS - 1
    assert TIMEOUT + COLLECTIVE_SECONDS <= seconds <= TIMEOUT + COLLECTIVE_SECONDS + 2 * TICK_SECONDS


def test_a_run_in_which_one_rank_moves(run: Run) -> None:
    """A line of its main thread, or a little CPU time, shows that it does; a twentieth of a core does not."""

    def next_line() -> None:
        run.lines[1] += 1

    run.go_on(3 * TIMEOUT, next_line)
    assert not run.found
    run.cpu[2] = 0.1
    run.go_on(3 * TIMEOUT)
    assert not run.found
    run.cpu[2] = 0.04
    run.go_on(2 * TIMEOUT)
    assert len(run.found) == 1


def test_a_rank_that_is_excused(run: Run) -> None:
    """Who waits for work that may take as long as it likes does not stand still until its last such wait is over."""
    with run.activities[0].waiting("work", (1,)):
        with run.activities[0].waiting("exchange"):
            pass
        run.go_on(5 * TIMEOUT)
        assert not run.found
    run.go_on(TIMEOUT)
    assert not run.found, "the limit counts from the end of the wait"
    run.go_on(2 * COLLECTIVE_SECONDS)
    assert len(run.found) == 1


def test_a_rank_that_moves_again_no_longer_counts(run: Run) -> None:
    """Ranks that stand still one after the other, and never all at once, are no stall."""

    def one_of_two() -> None:
        run.lines[run.clocks[0].now // (1.5 * TIMEOUT) % 2 == 0] += 1

    run.go_on(20 * TIMEOUT, one_of_two)
    assert not run.found


def test_ranks_that_were_stopped_have_not_stood(run: Run) -> None:
    """A node that was suspended, as by SIGSTOP, looks after a long time, of which a second counts."""
    for _ in range(10):
        for clock in run.clocks:
            clock.sleep(10 * TIMEOUT)
        run.go_on(4 * TICK_SECONDS)
    assert not run.found
    run.go_on(TIMEOUT)
    assert len(run.found) == 1


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """The channel of the only rank of a run, whose main thread stands in one line."""
    frame = SimpleNamespace(f_lasti=0, f_code=SimpleNamespace(co_filename="train.py", co_name="step"), f_back=None)
    monkeypatch.setattr(stacks, "frame_of", lambda ident=None: frame)
    monkeypatch.setattr(stacks, "of_thread", lambda ident=None: [("train.py", 7, "step")])
    notifier = Notifier(HashStore(), Placement(0, 1), FastClock())
    yield Channel(notifier, Placement(0, 1), Activity(None), True, TIMEOUT, b"")
    notifier.close()


def test_a_stall_is_told_with_the_hang_report(channel: Channel) -> None:
    """The channel's thread looks for it, and says where the ranks are."""
    reports: list[str] = []
    channel.on_stall = reports.append
    while not reports:
        channel._notifier.clock.sleep(TICK_SECONDS)
        channel.look()
        assert channel._notifier.clock.monotonic() < 1000 + 2 * TIMEOUT
    assert reports[0].startswith("no rank has moved for 30 s:\n")
    assert "rank 0 in step at train.py:7" in reports[0]
