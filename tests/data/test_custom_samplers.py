from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distwrap import shard_loader
from distwrap.errors import LoaderError
from tests.data.ranks import batches, interleaved, on_each_rank, standing_on
from tests.snapshot import random_state

DATA: Any = list(range(40))


class Backwards(Sampler[int]):
    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(DATA) - 1, -1, -1))


class Lengthless(Sampler[int]):
    """A sampler that does not know how many items it yields."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Buckets(Sampler[list[int]]):
    """Batches of different sizes, as a user makes them for sequences of different lengths."""

    def __init__(self, number: int) -> None:
        self.batches = [list(range(n * (n + 1) // 2, (n + 1) * (n + 2) // 2)) for n in range(number)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batches[int(number)] for number in torch.randperm(len(self.batches)))


RANDOM = [
    WeightedRandomSampler([float(weight) for weight in DATA], num_samples=24),
    SubsetRandomSampler(range(4, 28)),
    RandomSampler(DATA, num_samples=24),
    RandomSampler(DATA, num_samples=24, replacement=True),
]


def flat(loader: DataLoader[Any]) -> list[int]:
    return [index for batch in batches(loader) for index in batch]


def test_a_custom_sampler_is_dealt_out_in_its_own_order() -> None:
    """The ranks take turns along the order of the user's sampler."""
    loader = DataLoader(DATA, sampler=Backwards(), batch_size=4)
    assert interleaved(on_each_rank(4, lambda: flat(shard_loader(loader)))) == list(reversed(DATA))


def test_a_samplers_own_generator_is_alike_on_all_ranks() -> None:
    """Each rank made its generator with another seed; the order is one all the same, and the generators untouched."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    shares = []
    for rank, generator in enumerate(generators):
        sampler = WeightedRandomSampler([1.0] * 24, 24, replacement=False, generator=generator)
        with standing_on(rank, 3):
            shares.append(flat(shard_loader(DataLoader(DATA, sampler=sampler, batch_size=4))))
    assert sorted(interleaved(shares)) == list(range(24))
    assert [generator.initial_seed() for generator in generators] == [0, 1, 2]


@pytest.mark.parametrize("sampler", RANDOM, ids=lambda sampler: type(sampler).__name__)
def test_ranks_share_one_random_order(sampler: Sampler[int]) -> None:
    """Two ranks and three take turns along the same random order, though their own random numbers differ."""
    orders = []
    for world_size in (2, 3):
        shares = []
        for rank in range(world_size):
            torch.manual_seed(100 * world_size + rank)
            with standing_on(rank, world_size):
                shares.append(flat(shard_loader(DataLoader(DATA, sampler=sampler, batch_size=4))))
        orders.append(interleaved(shares))
    assert orders[0] == orders[1]
    assert len(orders[0]) == 24


def test_shares_of_a_subset_are_disjoint() -> None:
    """A random subset is seen whole, and each of its items by one rank."""
    loader = DataLoader(DATA, sampler=SubsetRandomSampler(range(10, 31)))
    shares = on_each_rank(4, lambda: flat(shard_loader(loader, mode="exact")))
    assert sorted(index for share in shares for index in share) == list(range(10, 31))


def test_each_epoch_draws_anew() -> None:
    """A random sampler gives another order in the next epoch, and the same one for the same epoch."""
    with standing_on(0, 2):
        loader = shard_loader(DataLoader(DATA, sampler=SubsetRandomSampler(range(30))))
    first, second = flat(loader), flat(loader)
    loader.set_epoch(0)  # type: ignore[attr-defined]
    assert flat(loader) == first != second


@pytest.mark.parametrize("sampler", RANDOM, ids=lambda sampler: type(sampler).__name__)
def test_random_samplers_leave_the_callers_random_numbers_alone(sampler: Sampler[int]) -> None:
    """Drawing a common order takes nothing from the training loop's own generators."""
    with standing_on(1, 2):
        loader = shard_loader(DataLoader(DATA, sampler=sampler))
    before = random_state()
    flat(loader)
    assert random_state() == before


@pytest.mark.parametrize("mode", ["pad", "drop"])
def test_a_sampler_without_length_can_be_shared(mode: Any) -> None:
    """A sampler without a length is dealt out in the modes that need none, and is told the epoch."""
    sampler = Lengthless()
    with standing_on(0, 2):
        loader = shard_loader(DataLoader(DATA, sampler=sampler, batch_size=3), mode=mode)
    loader.set_epoch(3)  # type: ignore[attr-defined]
    assert flat(loader) == ([0, 2, 4, 6] if mode == "pad" else [0, 2, 4])
    assert sampler.epoch == 3


def test_exact_mode_needs_a_length() -> None:
    """Exact mode refuses a sampler without a length, and says what to do."""
    loader = DataLoader(DATA, sampler=Lengthless())
    with standing_on(0, 2), pytest.raises(LoaderError, match="__len__"):
        shard_loader(loader, mode="exact")


def test_batches_of_a_custom_batch_sampler_stay_whole() -> None:
    """In pad mode each rank takes whole batches of the user's own, equally many."""
    ready = Buckets(7)
    taken = on_each_rank(2, lambda: batches(shard_loader(DataLoader(DATA, batch_sampler=ready))))
    assert [len(steps) for steps in taken] == [4, 4]
    dealt = interleaved(taken)
    assert sorted(dealt[:7]) == ready.batches
    assert dealt[7] == dealt[0]


def test_exact_mode_takes_each_custom_batch_once() -> None:
    """In exact mode each ready-made batch is taken once, in equally many steps: a left-over one joins the last."""
    ready = Buckets(7)
    taken = on_each_rank(3, lambda: batches(shard_loader(DataLoader(DATA, batch_sampler=ready), mode="exact")))
    assert [len(steps) for steps in taken] == [2, 2, 2]
    assert sorted(index for steps in taken for batch in steps for index in batch) == list(range(28))


def test_a_custom_batch_sampler_keeps_its_own_batch_size() -> None:
    """batch_size="global" cannot divide what a batch sampler makes, and says so."""
    loader = DataLoader(DATA, batch_sampler=Buckets(4))
    with standing_on(0, 2), pytest.raises(LoaderError, match="makes its own"):
        shard_loader(loader, batch_size="global")


class Tagged(BatchSampler):
    """A subclass of torch's batch sampler may do anything with its batches."""

    def __iter__(self) -> Iterator[list[int]]:
        return (list(reversed(batch)) for batch in super().__iter__())


def test_a_subclass_of_batch_sampler_makes_the_batches() -> None:
    """What a subclass of BatchSampler does to its batches is kept: whole batches are dealt out."""
    loader = DataLoader(DATA, batch_sampler=Tagged(range(8), 2, False))
    assert on_each_rank(2, lambda: batches(shard_loader(loader))) == [[[1, 0], [5, 4]], [[3, 2], [7, 6]]]


def test_a_plain_batch_sampler_is_cut_anew() -> None:
    """torch's own BatchSampler around a user's sampler is one of the loader's own: the samples are dealt out."""
    loader = DataLoader(DATA, batch_sampler=BatchSampler(Backwards(), 20, False))
    assert on_each_rank(2, lambda: [len(batch) for batch in batches(shard_loader(loader))]) == [[20], [20]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_without_batching_are_dealt_out(num_workers: int) -> None:
    """A loader with batch_size=None yields a rank's items one by one, in the order of DistributedSampler."""
    hand = DistributedSampler(DATA, 2, 1, seed=0)
    with standing_on(1, 2):
        ours = shard_loader(DataLoader(DATA, batch_size=None, shuffle=True, num_workers=num_workers))
    for epoch in range(2):
        hand.set_epoch(epoch)
        assert list(ours) == list(hand)


def test_items_without_batching_that_do_not_go_round_are_refused() -> None:
    """Where items cannot be merged, exact mode refuses a number that does not divide, and names the other modes."""
    with standing_on(0, 3), pytest.raises(LoaderError, match="items cannot be divided"):
        shard_loader(DataLoader(DATA, batch_size=None))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_without_a_step_is_refused(shuffle: bool) -> None:
    """A loader that has a batch in one process and none on a rank would train nothing, without a sign of it."""

    def sharded(size: int) -> DataLoader[Any]:
        return shard_loader(DataLoader(range(size), batch_size=5, shuffle=shuffle, drop_last=True))

    with standing_on(0, 3):
        with pytest.raises(LoaderError, match="no step"):
            sharded(9)
        assert len(sharded(15)) == 1


def test_data_without_a_loader_says_how_to_make_one() -> None:
    """A list or a tensor in the place of a DataLoader is told as a dataset is."""
    for data in ([1, 2], torch.zeros(3)):
        with pytest.raises(LoaderError, match=r"DataLoader\(dataset"):
            shard_loader(data)  # type: ignore[type-var]
