"""Waiting is told early: which ranks wait, where, and for whom; in one line, and not where nobody waits."""

from __future__ import annotations

import bdb
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.utils.data import DataLoader

import distwrap as dw
from distwrap.environments import Placement
from distwrap.errors import OptionError
from distwrap.options import Options, notice_seconds
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity, Kind
from distwrap.supervision.channel import TICK_SECONDS
from distwrap.supervision.locations import Location
from distwrap.supervision.observer import Observer, notice_of
from distwrap.supervision.waits import MainThread, Wait
from distwrap.testing import run_ranks
from tests.by_hand import by_hand
from tests.clock import FastClock
from tests.slow import INTERPRETERS

LIMIT = 60.0


@pytest.fixture(autouse=True)
def _told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTWRAP_QUIET", "0")
    monkeypatch.setenv("DISTWRAP_WAIT_NOTICE", "0.5")


@contextmanager
def heard(path: Path) -> Iterator[None]:
    """Write what this rank prints on standard error to a file, which it shares with the others."""
    before = sys.stderr
    with path.open("a", buffering=1) as file:
        sys.stderr = file
        try:
            yield
        finally:
            sys.stderr = before


def lines(path: Path, words: str) -> list[str]:
    """Return the lines with the words that ranks have printed."""
    return [line for line in path.read_text().splitlines() if words in line]


def keep_waiting(path: Path, number: int) -> None:
    """Be the rank that the others wait for, until so many waits were told."""
    deadline = time.monotonic() + LIMIT
    while len(lines(path, "waited")) < number:
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)


# Ranks 1 and 2 wait for rank 0, each time in another way.


def in_barrier(busy: Callable[[], None]) -> None:
    busy()
    dw.barrier()


def in_mean(busy: Callable[[], None]) -> None:
    busy()
    dw.mean(1.0)


def in_gather_object(busy: Callable[[], None]) -> None:
    busy()
    dw.gather_object("here")


def in_second_forward(busy: Callable[[], None]) -> None:
    """DDP arranges its buckets anew there, with the other ranks."""
    model = dw.wrap_model(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    busy()
    model(torch.ones(1, 1)).sum().backward()


def in_plain_all_reduce(busy: Callable[[], None]) -> None:
    busy()
    dist.all_reduce(torch.ones(1))


def in_wait_of_a_work(busy: Callable[[], None]) -> None:
    busy()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()


def in_backward(busy: Callable[[], None]) -> None:
    model = dw.wrap_model(torch.nn.Linear(2, 1))
    loss = model(torch.randn(3, 2) + dw.rank()).sum()
    busy()
    loss.backward()


def in_rank_zero_first(busy: Callable[[], None]) -> None:
    with dw.rank_zero_first():
        busy()


def in_rank_zero_function(busy: Callable[[], None]) -> None:
    dw.rank_zero_only(broadcast=True)(busy)()


def in_lockstep(busy: Callable[[], None]) -> None:
    for step in dw.lockstep(range(3)):
        if step == 1:
            busy()


def in_dispatching_loader(busy: Callable[[], None]) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.randn(6, 1)
            busy()  # rank 0 reads
            yield from torch.randn(6, 1)

    for _ in dw.shard_loader(DataLoader(Stream(), batch_size=1), split="dispatch"):
        pass


def in_save(busy: Callable[[], None]) -> None:
    path = dw.broadcast(str(Path(os.environ["WAITED"]).with_suffix(".pt")))
    busy()
    dw.save({"step": 1}, path)


WAITS = {
    in_backward: "backward",
    in_rank_zero_first: "rank_zero_first",
    in_second_forward: "forward",
    in_plain_all_reduce: "all_reduce",
    in_barrier: "barrier",
    in_mean: "mean",
    in_gather_object: "gather_object",
    in_wait_of_a_work: "in_wait_of_a_work",
    in_rank_zero_function: r"the rank-zero function waits_in_each_way\.<locals>\.busy\(\)",
    in_lockstep: "lockstep",
    in_dispatching_loader: "DataLoader",
    in_save: r"save \S+\.pt",
}
HEART, REST = list(WAITS)[:2], list(WAITS)[2:]
AS_LONG_AS_IT_TAKES = (in_rank_zero_first, in_rank_zero_function, in_save)


def waits_in_each_way(path: Path, names: list[str]) -> None:
    os.environ["WAITED"] = str(path)
    with heard(path):
        for number, name in enumerate(names, 1):

            def busy(number: int = number) -> None:
                if dw.rank() == 0:
                    keep_waiting(path, number)

            globals()[name](busy)
            while len(lines(path, " on after ")) < number:
                time.sleep(0.02)
            dw.barrier()


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(HEART, id="the heart"),
        pytest.param(REST, id="the rest", marks=pytest.mark.slow("nine waits, one after the other")),
    ],
)
def test_each_way_to_wait_is_told_once(waits: list[Callable[..., None]], tmp_path: Path) -> None:
    """One of the ranks that wait says in one line who waits, where, and for whom; and then that they go on."""
    path = tmp_path / "told"
    run_ranks(waits_in_each_way, 3, path, [wait.__name__ for wait in waits], timeout=4 * LIMIT)
    told, over = lines(path, "waited"), lines(path, " on after ")
    assert len(told) == len(over) == len(waits), path.read_text()
    for wait, line, end in zip(waits, told, over, strict=True):
        until = "as long as that takes" if wait in AS_LONG_AS_IT_TAKES else r"up to \d+ s"
        assert re.fullmatch(rf"distwrap: ranks 1, 2 have waited \d+ s for rank 0 \({until}\):", line), (wait, line)
        place = rf"  ranks 1, 2 in {WAITS[wait]} at test_wait_notice\.py:\d+(, step \d+)?"
        assert any(re.fullmatch(place, each) for each in lines(path, "  ranks 1, 2")), (wait, path.read_text())
        assert re.fullmatch(r"distwrap: ranks 1, 2 go on after \d+ s", end), (wait, end)
    assert len(lines(path, "  rank 0 in ")) == len(waits), path.read_text()


# Where nothing is to be said.


def computes_for_long() -> None:
    time.sleep(2)  # a first step that is compiled


def straggles() -> None:
    for _ in range(50):
        if dw.rank() == 0:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(1))


def is_in_a_debugger() -> None:
    if dw.rank() == 0:
        bdb.Bdb().runcall(time.sleep, 2)
    dw.barrier()


def computes_alone() -> None:
    if dw.rank() == 0:
        time.sleep(2)
    else:
        threading.Event().wait(2)


def computes_in_its_backward() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(2)
            return gradient

    Slow.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


def is_silent(path: Path) -> None:
    with heard(path):
        for body in (computes_for_long, straggles, is_in_a_debugger, computes_alone, computes_in_its_backward):
            body()
            with dw.rank_zero_first():
                print(f"after {body.__name__}", file=sys.stderr)
            dw.barrier()


@pytest.mark.slow("waits for a limit to pass")
def test_nothing_is_said_where_nobody_waits_in_vain(tmp_path: Path) -> None:
    """Ranks that compute, a loop in which one is slow all along, and a debugger are no waits."""
    path = tmp_path / "told"
    run_ranks(is_silent, 3, path, timeout=2 * LIMIT)
    assert not lines(path, "wait"), path.read_text()
    assert len(lines(path, "after ")) == 15, path.read_text()


def some_wait_for_some(path: Path) -> None:
    pair = dist.new_group([1, 2])
    with heard(path):
        if dw.rank() == 1:
            dist.recv(torch.ones(1), src=2)
            dist.all_reduce(torch.ones(1), group=pair)
        else:
            keep_waiting(path, 1)
            if dw.rank() == 2:
                dist.send(torch.ones(1), dst=1)
            keep_waiting(path, 2)
            if dw.rank() == 2:
                dist.all_reduce(torch.ones(1), group=pair)
        dw.barrier()


@pytest.mark.slow("waits for a limit to pass")
def test_a_wait_for_one_rank_or_for_a_group(tmp_path: Path) -> None:
    """Ranks that have no part in the exchange are not said to be waited for."""
    path = tmp_path / "told"
    run_ranks(some_wait_for_some, 4, path, timeout=LIMIT)
    first, second = lines(path, "waited")
    for line in (first, second):
        assert re.fullmatch(r"distwrap: rank 1 has waited \d+ s for rank 2 \(up to \d+ s\):", line), line
    assert [each.split(" at ")[0] for each in lines(path, "  rank 1 in")] == [
        "  rank 1 in recv",
        "  rank 1 in all_reduce",
    ]


@pytest.mark.slow("waits for a limit to pass")
def test_it_can_be_silenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said with the variable that silences lines."""
    monkeypatch.setenv("DISTWRAP_QUIET", "1")
    path = tmp_path / "told"
    run_ranks(waits_unheard, 2, path, timeout=LIMIT)
    assert path.read_text() == ""


def waits_unheard(path: Path) -> None:
    with heard(path):
        if dw.rank() == 0:
            time.sleep(2)
        dw.barrier()


PROGRAM = """
import pathlib, sys, time
import distwrap as dw

def main():
    with dw.setup_process_group(timeout=60):
        if dw.rank() == 0:
            time.sleep(6)
        dw.barrier()
        time.sleep(2)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow(INTERPRETERS)
def test_without_a_launcher(tmp_path: Path) -> None:
    """Ranks that share no board, and that nobody of ours has started, tell it too."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = by_hand(program, nprocs=3)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    told = [line for _, output in ended for line in output.splitlines() if "have waited" in line]
    assert 1 <= len(told) <= 2, ended  # and perhaps once more, after four times as long
    assert "have waited" not in ended[0][1]
    assert "ranks 1, 2 have waited" in told[0]
    assert "for rank 0 (up to 60 s):" in told[0]


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "30 s"])
def test_a_wrong_limit_is_refused(value: str) -> None:
    """The variable is a number of seconds, or 0."""
    with pytest.raises(OptionError, match="number of seconds"):
        Options().with_environment({"DISTWRAP_WAIT_NOTICE": value})


@pytest.mark.parametrize(("value", "seconds"), [("", 30.0), ("0", 0.0), (" 2.5 ", 2.5)])
def test_the_limit_is_what_the_variable_says(value: str, seconds: float) -> None:
    """0 is never, and without a word it is the default."""
    assert notice_seconds({"DISTWRAP_WAIT_NOTICE": value}) == seconds


# When it is said, by a clock of the test's.


class Standing:
    """A main thread that waits in one call, as `MainThread` sees it, until it moves."""

    def __init__(self, clock: FastClock) -> None:
        self._clock, self._since, self._moved = clock, clock.now, False
        self.stood, self.still, self.moves = 0.0, 0.0, 0

    def move(self) -> None:
        self._moved = True

    def look(self) -> bool:
        moved, self._moved = self._moved, False
        self._since = self._clock.now if moved else self._since
        self.stood, self.moves = self._clock.now - self._since, self.moves + moved
        return moved

    def wait(self) -> Wait:
        return Wait(self.stood, "exchange")


class Asked:
    """What a rank hears of the others: they are in a barrier, and rank 0 is not."""

    failed_at = None

    def __init__(self, rank: int, thread: Standing) -> None:
        self._rank, self._thread = rank, thread

    def location(self) -> Location:
        return Location("barrier", "train.py:8", wait=self._thread.wait(), begun=1)

    def locations(self) -> dict[int, Location | str]:
        return {0: Location("evaluate", "train.py:5"), **dict.fromkeys(range(1, RANKS), self.location())}


RANKS = 3


class Waiting:
    """Ranks 1 and 2, which wait for rank 0, each with notices of its own."""

    def __init__(self, seconds: float = 0.5) -> None:
        self.clock, store = FastClock(), HashStore()
        self.threads = [Standing(self.clock) for _ in range(1, RANKS)]
        self.asked = [Asked(rank, thread) for rank, thread in enumerate(self.threads, 1)]
        self.notices = [
            Observer(store, Placement(rank, RANKS), asked, thread, seconds, 600, self.clock)  # type: ignore[arg-type]
            for rank, (asked, thread) in enumerate(zip(self.asked, self.threads, strict=True), 1)
        ]

    def wait(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.sleep(TICK_SECONDS)
            for notice in self.notices:
                notice.look()

    def move(self) -> None:
        for thread in self.threads:
            thread.move()


def waited(capfd: pytest.CaptureFixture[str], words: str = "waited") -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if words in line]


def test_it_is_said_again_when_it_lasts_four_times_as_long(capfd: pytest.CaptureFixture[str]) -> None:
    """One of the ranks that wait says so for all; each line comes after four times the seconds of the one before."""
    waiting = Waiting()
    waiting.wait(100)
    told = waited(capfd)
    assert [re.findall(r"waited (\d+) s", line) for line in told] == [["0"], ["2"], ["8"], ["32"]]
    assert len({line.split(" have ")[0] for line in told}) == 1
    assert "ranks 1, 2 have waited" in told[0]
    assert "for rank 0 (up to 600 s):" in told[0]


def test_a_later_wait_at_the_same_place(capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that wait at a line again, as at each evaluation of one rank, say so when it takes four times as long."""
    waiting = Waiting()
    waiting.wait(1)
    waiting.move()
    waiting.wait(1.5)
    assert len(waited(capfd)) == 1
    waiting.wait(1)
    assert [re.findall(r"waited (\d+) s", line) for line in waited(capfd)] == [["2"]]


@pytest.mark.parametrize("has_failed", [False, True])
def test_the_end_of_a_wait_is_said_once_it_is_over(has_failed: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A second later, by the rank that has said the wait, unless it has failed meanwhile."""
    waiting = Waiting()
    waiting.wait(1)
    waiting.move()
    for asked in waiting.asked:
        asked.failed_at = [] if has_failed else None  # type: ignore[assignment]
    waiting.wait(0.5)
    assert not waited(capfd, "on after")
    waiting.wait(2)
    assert len(waited(capfd, "ranks 1, 2 go on after 1 s")) == (not has_failed)


def test_no_wait_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is said with a limit of 0."""
    Waiting(0.0).wait(100)
    assert not waited(capfd, "")


def test_where_a_thread_waits() -> None:
    """In a wait that says so it stands though its line changes; elsewhere it does not, and may wait at most."""
    clock, activity = FastClock(), Activity(None)
    thread = MainThread(activity, clock)

    def look() -> float:
        clock.sleep(0.5)
        thread.look()
        return thread.stood

    assert [look(), look(), look()] == [0.0, 0.0, 0.0]
    assert thread.wait() is None
    thread.on_accelerator = True
    assert thread.wait() == (0.0, "perhaps", ())
    with activity.waiting("work", (2,)):
        assert [look(), look(), look()] == [0.0, 0.5, 1.0]
        assert thread.wait() == (1.0, "work", (2,))
        assert thread.still == 0.0
        with activity.waiting("exchange"):
            assert [look(), look()] == [0.0, 0.5]
            assert thread.still == 0.5
    assert look() == 0.0


def test_where_a_process_computes_it_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can know what another call does, but that it computes; on an accelerator it may spin as it waits."""
    clock, frame = FastClock(), sys._getframe()
    monkeypatch.setattr(stacks, "frame_of", lambda: frame)
    thread = MainThread(Activity(None), clock)
    for computed, on_accelerator, stood in ((0, False, 0.0), (0, False, 0.5), (0.4, False, 0.0), (0.4, True, 0.5)):
        thread.on_accelerator = on_accelerator
        clock.sleep(0.5)
        clock.computed += computed
        thread.look()
        assert thread.stood == stood, (computed, on_accelerator)


# Words


def there(
    what: str, where: str, seconds: float = 0.0, kind: Kind = "exchange", begun: int = 0, peers: tuple[int, ...] = ()
) -> Location:
    return Location(what, where, wait=Wait(seconds, kind, peers) if seconds else None, begun=begun)


def told(rank: int, *where: Location | str) -> str:
    notice = notice_of(rank, dict(enumerate(where)), 30, 600)
    return "" if notice is None else notice.text.splitlines()[0]


def test_the_places_of_all_ranks_come_with_it() -> None:
    """They are told as in a hang report, and only ranks of one place go on together."""
    busy = Location("train", "a.py:1", begun=1)
    notice = notice_of(1, {0: busy, 1: there("barrier", "a.py:5", 31), 2: there("barrier", "a.py:9", 31)}, 30, 600)
    assert notice is not None
    assert notice.text.splitlines() == [
        "ranks 1, 2 have waited 31 s for rank 0 (up to 600 s):",
        "  rank 0 in train at a.py:1",
        "  rank 1 in barrier at a.py:5",
        "  rank 2 in barrier at a.py:9",
    ]
    assert notice.over == "rank 1 goes"


def test_ranks_in_different_exchanges_wait_for_each_other() -> None:
    """Where all wait, and not at one place, they are told to wait for each other; all at one place are not told."""
    backward, barrier = there("backward", "a.py:1", 31), there("barrier", "a.py:9", 40)
    assert told(0, backward, barrier, backward) == "ranks 0-2 have waited 31 s for each other (up to 600 s):"
    assert told(0, backward, backward) == ""
    assert told(0, backward, there("barrier", "a.py:9", 3)) == ""


def test_who_is_behind_is_waited_for() -> None:
    """Of ranks that do not wait those are named that have begun fewer collectives, or all where that does not show."""
    backward, log = there("backward", "a.py:1", 31, begun=8), Location("log", "a.py:5", begun=8)
    assert " for rank 2 (" in told(0, backward, log, Location("evaluate", "a.py:7", begun=7))
    assert " for ranks 1, 2 (" in told(0, backward, log, Location("evaluate", "a.py:7", begun=8))
    assert " for rank 1 (" in told(0, backward, "does not answer: it is gone")


def test_who_has_a_part_in_the_exchange_is_waited_for() -> None:
    """Others are named only where those with a part in it all wait themselves, so that nobody knows."""
    busy, late = Location("log", "a.py:5"), Location("evaluate", "a.py:7")
    waits = there("recv", "a.py:1", 31, peers=(2,))
    assert " for rank 2 (up to 600 s)" in told(0, waits, busy, late)
    assert " for rank 1 (up to 600 s)" in told(0, waits, busy, there("barrier", "a.py:9", 31))
    work = there("save", "a.py:1", 31, "work", peers=(2,))
    assert " for rank 2 (as long as that takes)" in told(0, work, busy, late)


def test_a_call_of_which_nobody_knows_may_be_a_wait() -> None:
    """It is one where another rank has begun fewer collectives."""
    item = there("step", "a.py:3", 31, "perhaps", begun=8)
    assert "rank 0 has waited 31 s for rank 1 (" in told(0, item, Location("evaluate", "a.py:7", begun=7))
    assert told(0, item, Location("evaluate", "a.py:7", begun=8)) == ""


def test_a_debugger_is_no_wait() -> None:
    """A person is at work there, and knows that others wait."""
    waits = there("barrier", "a.py:9", 31)
    assert told(0, waits, there("main", "a.py:7", 1, "debugger")) == ""
