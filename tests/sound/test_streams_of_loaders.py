"""No two loaders, workers, ranks, batches or epochs share a stream of random numbers, nor have one order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from distwrap import shard_loader
from tests.data.ranks import batches, interleaved, on_each_rank, standing_on
from tests.slow import few
from tests.snapshot import random_state

DATA: Any = list(range(40))
DRAWS = {"torch": lambda: torch.rand(1).item(), "random": random.random, "numpy": lambda: float(numpy.random.rand())}


def shuffled(**options: Any) -> DataLoader[Any]:
    return shard_loader(DataLoader(DATA, batch_size=20, shuffle=True, **options))


@pytest.mark.parametrize("workers", [0, 1])
def test_random_and_numpy_draw_different_numbers_in_a_batch(workers: int) -> None:
    """An augmentation that takes a number of each does not take the same one twice."""

    class Both(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)

    with standing_on(0, 2):
        rows = torch.cat(list(shard_loader(DataLoader(Both(), batch_size=3, num_workers=workers))))
    assert len(rows.unique()) == 12


class QuietAtFirst(Dataset[torch.Tensor]):
    """Augments from its 4th item on."""

    def __init__(self, name: str) -> None:
        self.draw = DRAWS[name]

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.draw() if index >= 8 else -1.0, dtype=torch.float64)


@pytest.mark.parametrize("name", DRAWS)
def test_augmentation_may_begin_after_a_quiet_batch(name: str) -> None:
    """It differs on each rank and in each epoch all the same, and takes nothing from the loop."""
    before = random_state()
    found = []
    for rank in (0, 1):
        with standing_on(rank, 2, seed=3):
            loader = shard_loader(DataLoader(QuietAtFirst(name), batch_size=2))
        found += [torch.cat(list(loader)) for _ in range(2)]
    assert random_state() == before
    assert len(torch.cat(found).unique()) == 4 * 20 + 1


def test_a_batch_draws_the_same_whenever_the_first_draw_was() -> None:
    """A batch after quiet ones has the random numbers that a worker gives it."""
    for name in DRAWS:
        with standing_on(1, 2, seed=3):
            alone = torch.cat(list(shard_loader(DataLoader(QuietAtFirst(name), batch_size=2))))
        with standing_on(1, 2, seed=3):
            helped = torch.cat(list(shard_loader(DataLoader(QuietAtFirst(name), batch_size=2, num_workers=1))))
        assert torch.equal(alone, helped)


def test_two_shuffled_loaders_have_two_orders() -> None:
    """A mixup of two loaders over one dataset mixes no sample with itself; each is one order over the ranks."""

    def two() -> list[list[int]]:
        return [batches(shuffled())[0], batches(shuffled())[0]]

    ranks = on_each_rank(2, two)
    assert all(first != second for first, second in ranks)
    for shares in zip(*ranks, strict=True):
        assert sorted(interleaved(list(shares))) == DATA


def test_a_loader_built_anew_in_each_epoch_shuffles_anew() -> None:
    """A loader that lives for one epoch, and is sharded in it, has another order in each."""
    with standing_on(0, 2):
        orders = [batches(shuffled()) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_loaders_generator_decides_its_shuffle() -> None:
    """Generators of one seed give one order, another seed another, and a generator that was drawn from another too."""

    def orders() -> list[list[list[int]]]:
        one, same, other = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
        told = [batches(shuffled(generator=generator)) for generator in (one, same, other)]
        torch.rand(1, generator=one)
        return [*told, batches(shuffled(generator=one))]

    for a, b, c, d in on_each_rank(2, orders):
        assert a == b
        assert a != c
        assert a != d
    first, second = on_each_rank(2, orders)
    assert sorted(interleaved([first[3][0], second[3][0]])) == DATA


class WithEpoch(RandomSampler):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Tagged(BatchSampler):
    """A subclass of torch's batch sampler, that may do anything with its batches."""


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sampler_inside_a_batch_sampler_is_told_the_epoch(world_size: int) -> None:
    """Not only a batch sampler of one's own is told it."""
    sampler = WithEpoch(DATA)
    with standing_on(0, world_size):
        loader: Any = shard_loader(DataLoader(DATA, batch_sampler=Tagged(sampler, 4, False)))
    loader.set_epoch(3)
    batches(loader)
    assert sampler.epoch == 3


class BatchesWithEpoch(BatchSampler):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_batch_sampler_is_told_the_epoch_in_one_process() -> None:
    """Also where the sampler inside it knows of none."""
    ready = BatchesWithEpoch(DATA, 4, False)  # type: ignore[arg-type]
    with standing_on(0, 1):
        loader: Any = shard_loader(DataLoader(DATA, batch_sampler=ready))
    loader.set_epoch(3)
    assert ready.epoch == 3


# Iterable datasets


class Stream(IterableDataset[Any]):
    """Shuffles by a global generator; augments by it too."""

    def __init__(self, name: str, divides: bool = False) -> None:
        self.name, self.divides = name, divides

    def __iter__(self) -> Iterator[Any]:
        order = list(range(24))
        if self.name == "torch":
            order = torch.randperm(24).tolist()
        elif self.name == "random":
            random.shuffle(order)
        else:
            numpy.random.shuffle(order)
        info = get_worker_info()
        if self.divides and info is not None:
            order = order[info.id :: info.num_workers]
        for item in order:
            yield torch.tensor([item, DRAWS[self.name]()], dtype=torch.float64)


class AsksFirst(Stream):
    """Asks how many workers there are before it shuffles."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None or not self.divides
        assert info is None or info.num_workers
        return super().__iter__()


def noisy(items: Any) -> torch.Tensor:
    """Collate with a number of each generator."""
    rows = torch.stack(items)
    noise = torch.tensor([draw() for draw in DRAWS.values()], dtype=torch.float64)
    return torch.cat([rows, noise.expand(len(rows), 3)], 1)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("workers", few([0, 2], 1, why="starts workers"))
def test_a_stream_shuffled_by_a_global_generator(name: str, divides: bool, workers: int) -> None:
    """Each item comes once, in another order in each epoch; augmentation and collation differ; the loop's is left."""

    def both() -> list[torch.Tensor]:
        dataset = Stream(name, divides)
        loader = shard_loader(DataLoader(dataset, 3, num_workers=workers, collate_fn=noisy), mode="exact")
        told = []
        for _ in range(2):
            epoch = []
            for batch in loader:
                random.random()  # as a loop's own
                numpy.random.rand()
                torch.rand(1)
                epoch.append(batch)
            told.append(torch.cat(epoch))
        return told

    ranks = on_each_rank(2, both, seed=5)
    orders = []
    for epoch in (0, 1):
        rows = torch.cat([told[epoch] for told in ranks])
        assert sorted(rows[:, 0].tolist()) == list(range(24))
        # Of a dataset that divides, the first item of each worker is made with the numbers of the common shuffle.
        assert len(rows[:, 1].unique()) == (24 if not divides else 23 if not workers else 21)
        orders.append(rows[:, 0].tolist())
    assert orders[0] != orders[1]
    noise = torch.cat([told[epoch][:, 2:] for told in ranks for epoch in (0, 1)])
    for column in range(3):
        assert len(noise[:, column].unique()) == 16  # batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stream, AsksFirst])
def test_a_stream_that_divides_gives_each_item_once(kind: Any, workers: int) -> None:
    """In persistent workers too, whether it asks for them before its shuffle or after."""

    def epochs() -> list[list[float]]:
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = shard_loader(DataLoader(kind("random", True), 3, **options), mode="exact")
        return [[float(row[0]) for batch in loader for row in batch] for _ in range(2)]

    for shares in zip(*on_each_rank(2, epochs), strict=True):
        assert sorted(item for share in shares for item in share) == list(range(24))


@pytest.mark.parametrize("divides", [False, True])
def test_a_stream_leaves_the_loops_random_numbers(divides: bool) -> None:
    """Without workers too the loop draws what it would have drawn."""
    before = random_state()
    for name in DRAWS:
        with standing_on(0, 2):
            loader = shard_loader(DataLoader(Stream(name, divides), 3, collate_fn=noisy), mode="exact")
        for _ in loader:
            assert random_state() == before
    assert random_state() == before
