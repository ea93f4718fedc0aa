"""A batch size that fits is found by all ranks together; a try that some ranks cannot repeat is an error."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distwrap as dw
from distwrap.data.fitting import is_out_of_memory
from distwrap.errors import CollectiveError, OptionError
from distwrap.testing import run_ranks
from tests.limits import SOON


def holding(most: tuple[int, ...], tried: list[int], ask: str = "torch") -> object:
    """Return a function for which only so many samples fit on each rank."""

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > most[dw.rank()]:
            if ask == "torch":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            torch.empty(2**60)
        return batch_size * 10 + dw.rank()

    return train


@pytest.mark.parametrize("ask", ["torch", "cpu"])
@pytest.mark.slow("fills memory until no more fits")
def test_all_ranks_halve_until_it_fits_on_each(ask: str) -> None:
    """The smallest memory decides; the error may be torch's own or that of the CPU's allocator."""

    def on_rank() -> tuple[list[int], tuple[int, int], int]:
        tried: list[int] = []
        found = dw.fit_batch_size(holding((40, 20), tried, ask), start=100)  # type: ignore[arg-type]
        return tried, found, dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2) == [([100, 50, 25, 12], (12, 120 + rank), 2) for rank in (0, 1)]
    tried: list[int] = []
    assert dw.fit_batch_size(holding((40,), tried, ask), start=100) == (25, 250)  # type: ignore[arg-type]
    assert tried == [100, 50, 25]


def test_where_nothing_fits_every_rank_says_so() -> None:
    """With the least too: the ranks are named, and none waits."""

    def on_rank() -> list[int]:
        tried: list[int] = []
        with pytest.raises(torch.OutOfMemoryError, match=r"rank 1 .* size 3 too"):
            dw.fit_batch_size(holding((40, 0), tried), start=14, least=2)  # type: ignore[arg-type]
        return [*tried, dw.reduce(1, "sum")]

    assert run_ranks(on_rank, 2) == [[14, 7, 3, 2]] * 2


def test_another_error_is_raised_on_every_rank() -> None:
    """On its rank as it is, on the others with the rank's name; it is not tried again."""

    def on_rank() -> int:
        def train(batch_size: int) -> None:
            if dw.rank() == 1:
                raise ValueError("shapes differ")

        with pytest.raises((ValueError, CollectiveError)) as caught:
            dw.fit_batch_size(train, start=8)
        if dw.rank() == 0:
            assert "failed on rank 1 for another reason than memory" in str(caught.value)
        else:
            assert str(caught.value) == "shapes differ"
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2) == [2, 2]


def test_ranks_that_have_exchanged_unequally_do_not_try_again() -> None:
    """A rank that is out of memory amid exchanges would meet those of the first try in the second one."""

    def on_rank() -> str:
        def train(batch_size: int) -> None:
            if dw.rank() == 0:
                pending.append(dist.all_reduce(torch.ones(1), async_op=True))
            elif batch_size > 4:
                raise torch.OutOfMemoryError("no")

        pending: list[Any] = []
        with pytest.raises(CollectiveError, match=r"rank 1 .* middle of exchanges") as caught:
            dw.fit_batch_size(train, start=8)
        if dw.rank() == 1:
            dist.all_reduce(torch.ones(1))
        for work in pending:
            work.wait()
        return str(caught.value)

    for message in run_ranks(on_rank, 2):
        assert "different numbers of them (1, 0): another try" in message


def test_ranks_that_have_exchanged_equally_try_again() -> None:
    """As where all run out of memory at the same place of a training; the numbers are those of one process."""

    def train(batch_size: int) -> float:
        torch.manual_seed(1)
        model = dw.wrap_model(torch.nn.Linear(1, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.arange(16.0, dtype=torch.float64)[:, None]
        for batch in dw.shard_loader(
            torch.utils.data.DataLoader(data, batch_size, drop_last=True), batch_size="global"
        ):
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch_size > 4:
                raise torch.OutOfMemoryError("no")
        return next(model.parameters()).item()

    def on_rank() -> tuple[int, float]:
        return dw.fit_batch_size(train, start=16)

    [(size, weight)] = run_ranks(on_rank, 1)
    assert size == 4
    for found in run_ranks(on_rank, 2):
        assert found == (4, pytest.approx(weight, rel=0, abs=1e-12))


def test_ranks_that_try_different_sizes_are_told() -> None:
    """Each would come to a batch size of its own."""

    def on_rank() -> int:
        with pytest.raises(CollectiveError, match="different batch"):
            dw.fit_batch_size(lambda size: size, start=8 + dw.rank())
        return dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2) == [2, 2]


def test_a_rank_does_not_wait_for_others_that_wait_for_it() -> None:
    """Where they are in an exchange of the function, the run ends with an error that says so."""

    def on_rank() -> None:
        def train(batch_size: int) -> None:
            if dw.rank() == 1:
                raise torch.OutOfMemoryError("no")
            dist.all_reduce(torch.ones(1))

        dw.fit_batch_size(train, start=8, patience=0.5)

    with pytest.raises(CollectiveError, match=r"rank 1 .* after 0"):
        run_ranks(on_rank, 2, timeout=SOON)


@pytest.mark.slow("fills memory until no more fits")
def test_what_a_try_has_made_is_freed() -> None:
    """Before the next try nothing of the last one is there, not in a traceback either."""
    left: list[weakref.ref[torch.Tensor]] = []

    def train(batch_size: int) -> None:
        assert all(ref() is None for ref in left)
        activations = torch.ones(batch_size)
        left.append(weakref.ref(activations))
        cycle: list[Any] = [activations]
        cycle.append(cycle)
        if batch_size > 2:
            raise torch.OutOfMemoryError("no")

    gc.disable()
    try:
        assert dw.fit_batch_size(train, start=8) == (2, None)
    finally:
        gc.enable()
    assert len(left) == 3


def test_what_is_no_batch_size_is_refused() -> None:
    """Before anything is tried."""
    for options, message in (
        ({"start": 0}, "start=0: it must be a whole number from 1"),
        ({"start": 4, "least": 8}, r"fit_batch_size\(start=4, least=8\)"),
        ({"start": 4, "patience": 0}, "patience=0: it must be a positive number of seconds"),
    ):
        with pytest.raises(OptionError, match=message):
            dw.fit_batch_size(lambda size: size, **options)  # type: ignore[arg-type]


def test_errors_that_are_for_lack_of_memory() -> None:
    """Those of torch and its devices, and no other."""
    for text in (
        "MPS backend out of memory",
        "CUDA error: out of memory",
        "DefaultCPUAllocator: can't allocate memory",
    ):
        assert is_out_of_memory(RuntimeError(text))
        assert not is_out_of_memory(ValueError(text))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
