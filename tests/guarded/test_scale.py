"""Many ranks, many tensors, large and deep objects: each works, or is refused with words that say what is too much."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap import distributed
from distwrap.errors import CollectiveError, SerializationError, WorkerError
from distwrap.testing import run_ranks

DEPTH = 100_000
MANY = 1_000
OBJECTS = 1_000_000
RESULT = 2 << 30  # bytes


def deep() -> list[Any]:
    """Return lists in lists, deeper than Python follows."""
    value: list[Any] = []
    for _ in range(DEPTH):
        value = [value]
    return value


def raised(folder: str) -> None:
    raise ValueError(deep())


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda folder: deep(), SerializationError, "cannot be sent back to the caller: .*deep recursion"),
        (lambda folder: dw.gather_object(deep()), CollectiveError, "cannot be sent to the other ranks: RecursionError"),
        (lambda folder: dw.broadcast(deep()), CollectiveError, "cannot be sent to the other ranks: RecursionError"),
        (lambda folder: dw.gather(deep()), CollectiveError, r"gather\(\) cannot follow containers that are nested so"),
        (lambda folder: dw.save(deep(), f"{folder}/a.pt"), RecursionError, "contains itself, or is nested deeper"),
        (raised, WorkerError, "raised ValueError"),
    ],
)
def test_an_object_that_is_nested_too_deep(
    tmp_path: Path, use: Callable[[str], Any], error: type[Exception], words: str
) -> None:
    """Python cannot pickle it: that is said, where it was to travel, and nobody crashes or waits."""
    with pytest.raises(error, match=words):
        run_ranks(use, 2, str(tmp_path))
    assert not os.listdir(tmp_path)


def memory() -> float:
    """Return the megabytes that this process has for itself, and its part of those that it shares."""
    found = re.search(r"^Pss: +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1000


@pytest.mark.nightly(row="long", why="faults/test_scale.py: many ranks, with a fault in one")
def test_128_ranks() -> None:
    """They start under fork, exchange and stop, with some 12 MB each."""

    @distributed(nprocs=128, launcher="fork", timeout=120)
    def many() -> float:
        assert dw.reduce(1, "sum") == 128
        return float(dw.mean(memory(), 1))

    for _ in range(2):
        assert many() < 30


@pytest.mark.nightly(row="long", why="group/test_collectives.py, with few of them")
def test_many_tensors_and_objects() -> None:
    """A thousand tensors, even or not, and a million objects."""

    def on_rank() -> int:
        gathered = dw.gather({str(number): torch.full((2,), float(dw.rank())) for number in range(MANY)})
        assert len(gathered) == MANY
        assert gathered["999"].tolist() == [0, 0, 1, 1]
        uneven = dw.gather([torch.ones(1 + (number + dw.rank()) % 7) for number in range(MANY)])
        assert [len(each) for each in uneven] == [2 + number % 7 + (number + 1) % 7 for number in range(MANY)]
        every = dw.gather_object([{"a": number} for number in range(OBJECTS)])
        assert [each[-1] for each in every] == [{"a": OBJECTS - 1}] * 2
        given = dw.broadcast(every[0] if dw.rank() == 0 else None)
        return len(given)

    assert run_ranks(on_rank, 2, timeout=110) == [OBJECTS] * 2


@pytest.mark.nightly(row="long", why="conformance/test_conformance.py, with few of them")
def test_a_model_of_a_thousand_parameters() -> None:
    """It is wrapped, trained and compared."""

    def on_rank() -> int:
        model = dw.wrap_model(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(MANY // 2))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(dw.rank()))).sum().backward()
            optimizer.step()
        dw.assert_in_sync(model)
        return len(list(model.parameters()))

    assert run_ranks(on_rank, 2, timeout=110) == [MANY] * 2


@pytest.mark.nightly(row="long", why="launch/test_transport.py, with hundreds of megabytes")
def test_a_result_of_two_gigabytes() -> None:
    """More than 2**31 bytes come home whole; the rank and the caller each take three times as much."""
    found = re.search(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None or int(found[1]) * 1024 < 8 * RESULT:
        pytest.skip("this machine has no 16 GB of free memory")

    @distributed(nprocs=2, launcher="fork", timeout=200)
    def large() -> torch.Tensor | None:
        return torch.arange(RESULT // 8 + 1) if dw.rank() == 0 else None

    result = large()
    assert result is not None
    assert len(result) == RESULT // 8 + 1
    assert int(result[-1]) == RESULT // 8
