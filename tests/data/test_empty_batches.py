"""An evaluation of uneven streams with a gather in its loop: each sample once, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import distwrap as dw
from distwrap import lockstep, rank, shard_loader, world_size
from distwrap.data.empty_batches import emptied
from distwrap.errors import LoaderError
from distwrap.testing import run_ranks
from tests.slow import few


class Uneven(IterableDataset[Any]):
    """A stream of which each rank takes a part of another length."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        mine = rank() if world_size() > 1 else None
        for number, count in enumerate(self.counts):
            if mine is None or number == mine:
                yield from ({"x": torch.full((3,), 10.0 * number + i), "name": f"{number}.{i}"} for i in range(count))


@pytest.mark.parametrize("counts", few([(7, 2, 0), (0, 0, 5), (1, 4, 4), (0, 0, 0), (2, 2, 2)], 2))
def test_each_sample_is_counted_once(counts: tuple[int, ...]) -> None:
    """However uneven, also where a rank has nothing at all; the metric is that of one process."""

    def evaluated() -> tuple[list[float], list[str], int, list[int]]:
        loader = shard_loader(DataLoader(Uneven(*counts), batch_size=2), split="dataset", mode="exact")
        values, names, sizes = [], [], []
        for batch in (steps := lockstep(loader, uneven="empty")):
            assert batch["x"].shape[1:] == (3,)
            values += dw.gather(batch["x"].sum(1)).tolist()
            names += dw.gather_object(batch["name"], joined=True)
            sizes.append(len(batch["x"]))
        assert lockstep(loader, uneven="empty").step == 0
        return sorted(values), sorted(names), steps.step, sizes

    [alone] = run_ranks(evaluated, 1)
    everyone = run_ranks(evaluated, 3)
    for values, names, steps, _ in everyone:
        assert (values, names) == alone[:2]
        assert steps == max(-(-count // 2) for count in counts)
    assert [sum(sizes) for *_, sizes in everyone] == list(counts)


def test_it_goes_with_stop_and_skip() -> None:
    """A rank that is out of data still heeds the others; and a second pass is whole."""

    def on_rank() -> list[list[int]]:
        found = []
        for stops in (True, False):
            steps = lockstep(range(2 + 4 * rank()), skip=lambda n: n == 3, uneven="empty", empty=lambda n: -1)
            seen = []
            for batch in steps:
                seen.append(batch)
                if stops and batch == 4:
                    steps.stop()
            found.append(seen)
        return found

    assert run_ranks(on_rank, 2) == [[[0, 1, -1, -1], [0, 1, -1, -1, -1]], [[0, 1, 2, 4], [0, 1, 2, 4, 5]]]


def test_a_batch_that_cannot_be_emptied_is_an_error_on_every_rank() -> None:
    """It says how to help; no rank waits."""

    def on_rank() -> int:
        with pytest.raises(LoaderError, match="empty=lambda"):
            list(lockstep([{1}] * (1 + rank()), uneven="empty"))
        with pytest.raises(LoaderError, match="ZeroDivisionError"):
            list(lockstep([1] * (1 + rank()), uneven="empty", empty=lambda n: n // rank()))
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2, timeout=20) == [2, 2]


def test_the_form_of_an_empty_batch() -> None:
    """Columns of any kind without rows; what has none stays."""
    batch = {"x": torch.ones(2, 3), "y": [torch.ones(2), ("a", "b")], "n": numpy.ones((2, 2)), "id": [1, 2], "k": 3}
    empty = emptied(batch)
    assert empty["x"].shape == (0, 3)
    assert [empty["y"][0].shape, empty["y"][1]] == [(0,), ()]
    assert empty["n"].shape == (0, 2)
    assert (empty["id"], empty["k"]) == ([], 3)
    assert emptied(torch.tensor(3.0)) == 3.0
    assert len(batch["x"]) == 2  # type: ignore[arg-type]
