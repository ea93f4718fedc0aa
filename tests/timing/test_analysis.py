"""What the figures of all ranks say together, and what is advised: on figures that the test makes."""

from __future__ import annotations

import random

import pytest

from distwrap.stopwatch import Part, Row
from distwrap.timing.advice import advise
from distwrap.timing.analysis import Analysis, analysed
from distwrap.timing.recorder import RankTimes, Rows

LINK = 0.002


def row(**seconds: float) -> Row:
    return [seconds.get(part.name.lower(), 0.0) for part in Part]


def rank(number: int, rows: list[Row], **more: object) -> RankTimes:
    told: dict[str, object] = {
        "host": f"node{number}", "device": "cpu", "steps": len(rows), "batches": 2, "samples": 8.0,
        "queued": 0.0, "process_memory": 10**9, "device_memory": None, "gradient_bytes": 4_000_000,
        "cpus": 4, "threads": 4, "workers": 0, "is_ddp": False,
    }  # fmt: skip
    total = [sum(column) for column in zip(*rows, strict=True)]
    return RankTimes(rank=number, total=total, kept=dict(enumerate(rows)), **{**told, **more})  # type: ignore[arg-type]


def together(*busy: list[Row], **more: object) -> Analysis:
    """Let ranks with these steps wait for each other, as an exchange lets them."""
    for step in zip(*busy, strict=True):
        longest = max(map(sum, step))
        for own in step:
            own[Part.EXCHANGE] = longest - sum(own) + LINK
    return analysed([rank(number, rows, **{"batches": len(busy), **more}) for number, rows in enumerate(busy)])


def healthy(forward: float = 0.02, backward: float = 0.04) -> Row:
    return row(forward=forward, backward=backward, optimizer=0.005)


def test_ranks_that_are_alike_get_no_advice() -> None:
    found = together(*([healthy() for _ in range(20)] for _ in range(4)))
    assert (found.lags, advise(found)) == ([], [])
    assert found.step == pytest.approx(0.067)
    assert found.alone == pytest.approx(0.065)
    assert found.speedup == pytest.approx(4 * 65 / 67)


def test_ranks_that_are_quick_in_different_parts() -> None:
    """One alone would be no slower than any of them: it is no gain of more than there are ranks."""
    parts = ("data", "forward", "backward")
    found = together(*([row(**{part: 0.01 for part in parts if part != quick})] * 9 for quick in parts))
    assert found.alone == pytest.approx(0.02)
    assert found.efficiency < 1


def test_what_is_lost_in_rounding_is_no_exchange() -> None:
    made = random.Random(0)
    for _ in range(200):
        waits = [[0.0, made.random(), made.random()] for _ in range(5)]
        ranks = zip(*waits, strict=True)
        rows = [[row(exchange=wait, forward=1 - wait) for wait in of_rank] for of_rank in ranks]
        found = analysed([rank(number, of_rank) for number, of_rank in enumerate(rows)])
        assert found.link >= 0


def test_a_rank_that_is_always_slow() -> None:
    slow = [[healthy(backward=0.06 if number == 2 else 0.04) for _ in range(20)] for number in range(4)]
    found = together(*slow)
    (lag,) = found.lags
    assert (lag.ranks, lag.part, lag.takes_turns) == ([2], Part.BACKWARD, False)
    assert lag.share == pytest.approx(0.020 / 0.087)
    assert lag.slower / lag.usual == pytest.approx(0.5)
    words = "the others wait 23 % of each step for rank 2: backward takes 60.0 ms there, and 40.0 ms elsewhere"
    assert advise(found)[0].text.startswith(words)


def test_two_ranks_that_are_slow_alike() -> None:
    """Whoever of them comes last by a hair: they are named together, and take no turns."""
    busy = [
        [healthy(forward=(0.04 if number < 2 else 0.02) + 1e-4 * ((number + step) % 2)) for step in range(20)]
        for number in range(6)
    ]
    (lag,) = together(*busy).lags
    assert (lag.ranks, lag.part, lag.takes_turns) == ([0, 1], Part.FORWARD, False)


def test_ranks_that_take_turns() -> None:
    """As with batches of uneven length."""
    busy = [[healthy(forward=0.05 if (number + step) % 4 == 0 else 0.02) for step in range(20)] for number in range(4)]
    found = together(*busy)
    (lag,) = found.lags
    assert (lag.takes_turns, lag.part) == (True, Part.FORWARD)
    assert lag.share == pytest.approx(0.030 / 0.097)
    assert "another one at each step" in advise(found)[0].text


def test_a_slow_rank_among_ranks_that_take_turns() -> None:
    busy = [
        [
            healthy(forward=0.04 if (number + step) % 4 == 0 else 0.02, backward=0.055 if number == 1 else 0.04)
            for step in range(40)
        ]
        for number in range(4)
    ]
    first, second = together(*busy).lags
    assert (first.ranks, first.part, first.takes_turns) == ([1], Part.BACKWARD, False)
    assert second.takes_turns


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("evaluation", "Let every rank evaluate its share"),
        ("checkpoint", "background=True"),
        ("own", "is_rank_zero"),
        ("data", "num_workers"),
    ],
)
def test_what_one_rank_does_alone(part: str, words: str) -> None:
    busy = [[healthy() for _ in range(20)] for _ in range(2)]
    for step in range(0, 20, 5):
        busy[0][step][Part[part.upper()]] = 0.1
    found = together(*busy)
    (lag,) = found.lags
    assert (lag.ranks, lag.part, lag.takes_turns) == ([0], Part[part.upper()], False)
    assert lag.share == pytest.approx(0.02 / 0.087)
    text = advise(found)[0].text
    assert f"for rank 0: {part} takes 20.0 ms there, and 0.0 ms elsewhere" in text
    assert words in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"queued": 0.03}, "It waits 30.0 ms of a step for a free CPU"), ({"queued": None}, ""), ({"queued": 0.015}, "")],
)
def test_why_a_rank_is_slow(settings: dict[str, object], words: str) -> None:
    usual = {"queued": 0.0}
    busy = [[healthy(forward=0.06 if number == 1 else 0.02) for _ in range(5)] for number in range(3)]
    found = together(*busy, **usual)
    ranks = [
        rank(each.rank, list(each.kept.values()), **(usual | (settings if each.rank == 1 else {})))
        for each in found.ranks
    ]
    text = advise(analysed(ranks))[0].text
    assert text.partition("elsewhere.")[2].strip().startswith(words)
    assert words or text.endswith("elsewhere.")


def test_a_rank_with_workers_that_waits_for_data() -> None:
    """It is not told to take workers."""
    busy = [[healthy() for _ in range(20)] for _ in range(2)]
    for step in busy[1]:
        step[Part.DATA] = 0.05
    assert "More workers" in advise(together(*busy, workers=2))[0].text


def test_an_exchange_that_takes_now_longer_here_now_there() -> None:
    """Ranks that leave it at other moments hold nobody up: none was busy for longer."""
    busy = [[healthy() for _ in range(50)] for _ in range(2)]
    for number, rows in enumerate(busy):
        for step, each in enumerate(rows):
            each[Part.EXCHANGE] = 0.02 if (number + step) % 2 else 0.001
    found = analysed([rank(number, rows) for number, rows in enumerate(busy)])
    assert (found.lags, found.waiting) == ([], 0.0)
    assert found.link == pytest.approx(0.0105)


def test_steps_that_change_keep_their_share_in_long_runs() -> None:
    """Of many steps some are looked at one by one, whatever their period."""
    for period in (2, 20, 64):
        rows = [Rows(), Rows()]
        for step in range(8_000):
            busy = [
                0.010 * period if step % period == 0 and step // period % 2 == number else 0.010 for number in (0, 1)
            ]
            for number, each in enumerate(rows):
                each.add(row(forward=busy[number], exchange=max(busy) - busy[number] + LINK))
        found = analysed(
            [
                RankTimes(
                    **{**vars(rank(number, [row()])), "steps": each.count, "total": each.total, "kept": each.kept}
                )
                for number, each in enumerate(rows)
            ]
        )
        waits = 0.010 * (period - 1) / period
        assert found.waiting == pytest.approx(waits / 2, rel=0.1)
        assert found.lags[0].takes_turns
        assert found.lags[0].share == pytest.approx(waits / found.step, rel=0.15)


def test_what_all_ranks_wait_for() -> None:
    loader = advise(together(*([row(data=0.03, forward=0.03, backward=0.04)] * 5 for _ in range(2))))
    assert [round(piece.gain, 2) for piece in loader] == [0.29]
    assert loader[0].text.startswith(
        "every rank waits 29 % of each step for its loader, which reads in the loop itself. Da"
    )
    own = advise(together(*([row(own=0.03, forward=0.03, backward=0.04)] * 5 for _ in range(2))))
    assert own[0].text.startswith("29 % of each step is the loop's own code")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 2}, "with 2 worker(s), and 4 CPU(s) for each rank. Take more workers"),
        ({"workers": 2, "host": "one"}, "with 2 worker(s), and 2 CPU(s) for each rank."),
    ],
)
def test_a_loader_with_workers(settings: dict[str, object], words: str) -> None:
    found = together(*([row(data=0.03, forward=0.03, backward=0.04)] * 5 for _ in range(2)), **settings)
    assert words in advise(found)[0].text


def test_a_link_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LINK", 0.02)
    first, *_ = advise(together(*([healthy()] * 5 for _ in range(2)), gradient_bytes=16 * 10**6, is_ddp=True))
    assert "24 % of each step goes to the exchange of 16.0 MB of gradients" in first.text
    assert "accumulate(loader, 4) exchanges a quarter as often (18 % of a step less)" in first.text
    assert "doctor --comm --weights 4e+06 --step-ms 65.0" in first.text
    first, *_ = advise(together(*([healthy()] * 5 for _ in range(2))))
    assert "goes to the exchange. A larger batch needs fewer exchanges for as many samples." in first.text
    monkeypatch.setattr(f"{__name__}.LINK", 0.009)
    first, *_ = advise(together(*([healthy()] * 5 for _ in range(2)), gradient_bytes=900_000, is_ddp=True))
    assert first.text.startswith("12 % of each step goes to the exchange of 900.0 kB")
    assert "comm=" not in first.text, "which brings nothing for so few bytes"


def test_cpus_that_are_shared() -> None:
    """By too many threads on all ranks; by other programs, where ranks are late in turns."""
    (first,) = advise(together(*([healthy()] * 5 for _ in range(2)), queued=0.02, threads=4, workers=3))
    assert first.gain == pytest.approx(0.02 / 0.067)
    assert "computes with 4 thread(s), reads with 3 worker(s) and may run on 4 CPU(s)" in first.text
    busy = [[healthy(forward=0.04 if (number + step) % 2 else 0.02) for step in range(20)] for number in range(2)]
    (turns,) = [piece.text for piece in advise(together(*busy, queued=0.01)) if "another one" in piece.text]
    assert "for a free CPU" in turns


def test_ranks_that_share_a_batch() -> None:
    """One rank alone would do the work of all of them: four ranks are as fast as four, and not as sixteen."""
    found = together(*([healthy() for _ in range(5)] for _ in range(4)), batches=1)
    assert found.alone == pytest.approx(4 * 0.065)
    assert found.speedup == pytest.approx(4 * 65 / 67)


def test_shared_evaluation_takes_its_part_of_the_time() -> None:
    """One rank alone evaluates too, once in as many samples; shared, each rank has a part of it."""
    busy = [[healthy() for _ in range(20)] for _ in range(2)]
    for step in range(0, 20, 5):
        busy[0][step][Part.EVALUATION] = 0.1
    found = together(*busy)
    assert found.alone == pytest.approx(0.065 + 0.02 / 2)
    assert advise(found)[0].gain == pytest.approx(0.01 / 0.087)


def test_waits_that_no_part_explains() -> None:
    """Nothing is said of a rank that is slower in nothing than most of the others."""
    steps = ((0.1, 0.0), (0.1, 0.03), (0.1, 0.03), (0.0, 0.1))
    ranks = [rank(number, [row(forward=own, exchange=wait)] * 5) for number, (own, wait) in enumerate(steps)]
    found = analysed(ranks)
    assert not [lag for lag in found.lags if not lag.takes_turns]
    assert not [piece for piece in advise(found) if "rank 0" in piece.text]


def test_one_process() -> None:
    found = analysed([rank(0, [healthy() for _ in range(5)])])
    assert (found.speedup, found.lags, found.link, advise(found)) == (1.0, [], 0.0, [])


@pytest.mark.parametrize("count", [1, 2, 959, 2048, 2049, 4097, 12_288])
def test_rows_add_up(count: int) -> None:
    """However many steps there were, few are kept one by one, and all are in the sum."""
    rows = Rows()
    for step in range(1, count + 1):
        rows.add(row(own=float(step)))
    assert rows.count == count
    assert rows.total[Part.OWN] == count * (count + 1) / 2
    assert min(count, 1024 - 64) <= len(rows.kept) <= 2048
    assert all(each[Part.OWN] == number for number, each in rows.kept.items())


def test_what_is_no_more_than_the_machines_own_unrest() -> None:
    """Ranks that compute the same, and are late by little for no reason that is seen, are left alone."""
    for turns in (False, True):
        late = [[0.004 * ((number + turns * step) % 2) for step in range(20)] for number in range(2)]
        found = together(*([healthy(forward=0.02 + seconds) for seconds in rank] for rank in late))
        assert [lag.takes_turns for lag in found.lags] == [turns]
        assert advise(found) == []
