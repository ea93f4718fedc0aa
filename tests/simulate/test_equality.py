"""Simulated ranks train what one process trains, under every strategy, and exchange by each algorithm's formula."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from distwrap.testing import simulate
from distwrap.versions import TORCH
from tests.comm import test_gradient_algorithms as gradients, test_weight_algorithms as weights
from tests.equality import program
from tests.equality.on_ranks import verdicts
from tests.equality.rows import ROWS
from tests.slow import nightly, slow

ROWS_OF_RANKS = [row for row in ROWS if row.strategy != "dp"]
MORE = "two simulated ranks show it"


@pytest.mark.timeout(300)  # a guard
@pytest.mark.parametrize(
    ("nprocs", "is_fast"),
    [
        (2, True),
        slow(2, False, why="every row of strategy and step"),
        nightly(4, False, row="products", why=MORE),
        nightly(8, True, row="products", why=MORE),
    ],
)
def test_weights_are_those_of_one_process(nprocs: int, is_fast: bool, tmp_path: Path) -> None:
    """Rows of `tests/equality`, one after the other, each compared with one process within 1e-12 in float64."""
    rows = [row for row in ROWS_OF_RANKS if row.is_fast or not is_fast]
    rows = [row for row in rows if nprocs >= 4 or row.launch != "four ranks"]
    simulate(program.train, nprocs, rows, tmp_path)
    wrong = {str(row): each for row in rows for each in verdicts(tmp_path, str(row)) if each}
    refused = f"or newer, and this is {TORCH}"  # for what a row needs, as tests/conftest.py skips a test
    assert {row: words for row, words in wrong.items() if refused not in words} == {}
    assert [len(verdicts(tmp_path, str(row))) for row in rows] == [nprocs] * len(rows)


@pytest.mark.parametrize("ranks", [2, *(nightly(ranks, row="products", why=MORE) for ranks in (4, 8))])
def test_weights_follow_the_formula_of_each_algorithm(ranks: int) -> None:
    """Step by step and rank by rank, as `tests/comm` compares real ranks."""
    chosen = {name: algorithm for name, (algorithm, _) in weights.ALGORITHMS.items()}
    everyone = simulate(weights._descend_at_each_scale, ranks, chosen)
    for index, scale in enumerate(weights.SCALES):
        weights._compare([found[index] for found in everyone], ranks, scale)


@pytest.mark.parametrize(
    "ranks",
    [slow(2, why="all algorithms over all buckets"), *(nightly(ranks, row="products", why=MORE) for ranks in (4, 8))],
)
def test_gradients_follow_the_formula_of_each_algorithm(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = simulate(gradients._average_everything, ranks)
    monkeypatch.setattr(gradients, "everyones", lambda _: everyone)
    for name in gradients.ALGORITHMS:
        gradients.test_like_the_reference_and_alike_on_all_ranks(ranks, name)


def test_one_run_is_one_order() -> None:
    """The same bits twice, and under another order of the ranks: sums are added in the order of the ranks."""
    chosen = {name: algorithm for name, (algorithm, _) in weights.ALGORITHMS.items() if name != "shift_one"}
    runs = [simulate(weights._descend, 3, chosen, 1.0, schedule=schedule) for schedule in (None, None, 1, 2)]
    for one, other in itertools.pairwise(runs):
        for mine, theirs in zip(one, other, strict=True):
            for name in chosen:
                assert [each.tobytes() for each in mine[name][0]] == [each.tobytes() for each in theirs[name][0]], name
