"""Which samples each rank takes, in torch's order and in the computed one."""

from __future__ import annotations

import resource
from collections import Counter
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from distwrap import rank, shard_loader
from distwrap.data.indices import Mode
from distwrap.data.samplers import Order
from distwrap.errors import LoaderError, OptionError
from distwrap.testing import run_ranks

Shuffle = Literal["", "torch", "stream"]


def epochs(n: int, world_size: int, mode: Mode, shuffle: Shuffle, seed: int, count: int = 2) -> list[list[list[int]]]:
    """What each rank takes in each of some epochs: [epoch][rank][sample]."""
    ranks = [Order(range(n), r, world_size, mode, seed, shuffle) for r in range(world_size)]
    return [[list(each) for each in ranks] for _ in range(count)]


@given(
    st.integers(0, 200),
    st.integers(1, 9),
    st.sampled_from(["pad", "exact", "drop"]),
    st.sampled_from(["", "torch", "stream"]),
    st.integers(0, 2**40),
)
def test_each_sample_as_often_as_promised(n: int, world_size: int, mode: Mode, shuffle: Shuffle, seed: int) -> None:
    """Exact: each once. Pad: all ranks equally many, each sample once or once more. Drop: each at most once."""
    for shares in epochs(n, world_size, mode, shuffle, seed):
        taken = Counter(sample for share in shares for sample in share)
        lengths = {len(share) for share in shares}
        assert set(taken) <= set(range(n))
        if mode == "exact":
            assert taken == Counter(range(n))
        elif mode == "drop":
            assert lengths == {n // world_size}
            assert not taken or max(taken.values()) == 1
        elif n:
            assert lengths == {-(-n // world_size)}
            assert set(taken) == set(range(n))
            assert max(taken.values()) - min(taken.values()) <= 1


@given(st.integers(1, 100), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 1000), st.integers(0, 9))
def test_torchs_order_is_torchs(n: int, world_size: int, shuffles: bool, drops: bool, seed: int, epoch: int) -> None:
    """Bit for bit what DistributedSampler yields, also where it pads more than once round."""
    for r in range(world_size):
        theirs = DistributedSampler(range(n), world_size, r, shuffle=shuffles, seed=seed, drop_last=drops)  # type: ignore[arg-type]
        theirs.set_epoch(epoch)
        ours = Order(range(n), r, world_size, "drop" if drops else "pad", seed, "torch" if shuffles else "")
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_order_is_the_worlds(world_size: int) -> None:
    """The ranks' samples, one of each in turn, are one order for any number of ranks; another epoch's is another."""
    wholes = []
    for ranks in (1, world_size):
        for shares in epochs(24, ranks, "exact", "stream", 5):
            wholes.append([sample for around in zip(*shares, strict=True) for sample in around])
    assert wholes[0] == wholes[2]
    assert wholes[1] == wholes[3]
    assert wholes[0] != wholes[1]
    assert sorted(wholes[0]) == list(range(24))


class Huge(Dataset[int]):
    """A dataset whose samples are their own numbers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.n
        return index


def first_batches(n: int, order: str, shuffle: bool, mode: str) -> tuple[list[int], int, int]:
    loader = DataLoader(Huge(n), batch_size=4, shuffle=shuffle)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sharded = shard_loader(loader, order=order, mode=mode, seed=1)  # type: ignore[arg-type]
    batches = iter(sharded)
    taken = [*next(batches).tolist(), *next(batches).tolist()]
    return taken, len(sharded), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize(
    ("order", "shuffle", "mode"), [("auto", True, "auto"), ("stream", True, "exact"), ("auto", False, "auto")]
)
def test_a_billion_samples_are_no_more_than_a_thousand(order: str, shuffle: bool, mode: str) -> None:
    """The first batches of 10^9 samples take no memory to speak of, and the ranks' are apart."""
    taken = run_ranks(first_batches, 2, 10**9, order, shuffle, mode)
    samples = [sample for samples, _, _ in taken for sample in samples]
    assert len(set(samples)) == 16
    assert [batches for _, batches, _ in taken] == [125_000_000] * 2
    assert all(kilobytes < 20_000 for _, _, kilobytes in taken)
    assert (sorted(samples) == list(range(16))) is not shuffle


def numbers_after(order: str, mode: str) -> list[float]:
    own = torch.Generator().manual_seed(1)
    torch.manual_seed(5)
    for generator in (None, own):
        loader = DataLoader(range(12), batch_size=2, shuffle=True, generator=generator)
        for _ in shard_loader(loader, order=order, mode=mode):  # type: ignore[arg-type]
            pass
    return [torch.rand(1).item(), torch.rand(1, generator=own).item()]


@pytest.mark.parametrize("mode", ["auto", "same"])
@pytest.mark.parametrize("order", ["stream", "torch"])
def test_an_order_takes_none_of_the_loops_random_numbers(order: str, mode: str) -> None:
    """Neither torch's nor those of the loader's generator: what follows is alike in one process and on two ranks."""
    [alone] = run_ranks(numbers_after, 1, order, mode)
    assert run_ranks(numbers_after, 2, order, mode) == [alone] * 2
    torch.manual_seed(5)
    assert alone == [torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(1)).item()]


def refused(order: str, sampler: Any) -> str:
    try:
        shard_loader(DataLoader(range(8), sampler=sampler), order=order)  # type: ignore[arg-type]
    except (LoaderError, OptionError) as error:
        return f"{type(error).__name__}: {error}"
    return f"taken on rank {rank()}"


def test_an_order_that_is_not_asked_for() -> None:
    """A wrong name, and an order for a loader that has one of its own, are refused."""
    assert refused("random", None).startswith("OptionError: unknown order 'random'.")
    said = run_ranks(refused, 2, "stream", [3, 1, 2])
    assert all(text.startswith("LoaderError: order='stream' says how a loader with shuffle=True") for text in said)
