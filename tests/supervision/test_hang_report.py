"""All ranks are asked where they are, and what is known of those that do not answer is told."""

from __future__ import annotations

import json
import time

import pytest
from torch.distributed import HashStore

from distwrap.network.waiting import count_in
from distwrap.supervision.hang_report import ANSWER_SECONDS, ask_all, read_answers
from distwrap.supervision.locations import LEFT, Location
from tests.clock import FastClock

HERE = Location("barrier", "train.py:8")


def answer(store: HashStore, asked: int, *ranks: int, of: int) -> None:
    """Answer the question for some ranks of a run."""
    for rank in ranks:
        store.set(f"report/{asked}/{rank}", json.dumps(HERE))
        count_in(store, f"answers/{asked}", of)


def test_ranks_that_answer_alike_are_told_together() -> None:
    """Nobody waits once the last one has answered."""
    store, clock = HashStore(), FastClock()
    said = ask_all(store, 3, lambda: None, lambda asked: answer(store, asked, 0, 1, 2, of=3), clock)
    assert said == "  ranks 0-2 in barrier at train.py:8"
    assert clock.now == 1000.0


def test_ranks_that_do_not_answer() -> None:
    """After the limit each is told by what is known of it: where it was last seen, that it has left, or nothing."""
    store, clock = HashStore(), FastClock()
    store.set("seen/1", json.dumps([time.time() - 5, Location("evaluate", "train.py:5")]))
    store.set("left/2", "")
    said = ask_all(store, 4, lambda: None, lambda asked: answer(store, asked, 0, of=4), clock)
    assert 1000 + ANSWER_SECONDS <= clock.now <= 1000 + ANSWER_SECONDS + 1
    first, second, third, fourth = said.splitlines()
    assert first == "  rank 0 in barrier at train.py:8"
    assert second.startswith("  rank 1 does not answer")
    assert "ago it was in evaluate at train.py:5" in second
    assert third == f"  rank 2 {LEFT}"
    assert fourth.startswith("  rank 3 does not answer")
    assert "ago" not in fourth


@pytest.mark.parametrize("text", ["", "[]", "{", '[1, 2, 3, 4, 5, "x"]', "[" * 10_000])
def test_an_answer_that_no_rank_has_written(text: str) -> None:
    """Whatever another program has written is told as that, or as no answer."""
    store = HashStore()
    store.set("report/1/0", text)
    found = read_answers(store, 1, 1)[0]
    assert isinstance(found, str)
    assert "no rank has written" in found or "does not answer" in found


def test_many_who_ask_at_once_ask_once() -> None:
    """Of ranks that ask all others at the same time one does, and all have the same answer."""
    store, notified, heard = HashStore(), [], []

    class Asking(FastClock):
        """Clock in whose first moment the next rank asks too, and in that of the last one the first has its answers."""

        def sleep(self, seconds: float, /) -> None:
            super().sleep(seconds)
            if not store.check(["said/1"]):
                ask_next()

    depth = 0

    def ask_next() -> None:
        nonlocal depth
        depth += 1
        if depth == 6:
            store.set("said/1", "  rank 0 in barrier")
            return
        heard.append(ask_all(store, 2, lambda: notified.append(depth), lambda asked: None, Asking()))

    ask_next()
    assert notified == [1]
    assert heard[:4] == ["  rank 0 in barrier"] * 4
    assert store.add("reports", 0) == 1
