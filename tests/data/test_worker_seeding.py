"""Random numbers where samples are fetched: apart for every rank, worker and batch, and the same again in every run."""

from __future__ import annotations

import itertools
import random
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from distwrap import shard_loader
from distwrap.data.worker_seeding import batch_seed, worker_seed
from distwrap.testing import run_ranks
from tests.data.ranks import standing_on
from tests.snapshot import random_state


class Noise(Dataset[torch.Tensor]):
    """Each item is what the three generators give."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(1).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


class Still(Dataset[int]):
    """Draws nothing."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


def noise(rank: int, world_size: int = 2, *, seed: int | None = 7, epoch: int = 0, **options: Any) -> torch.Tensor:
    """All items of a rank in an epoch, in the order of their indices."""
    with standing_on(rank, world_size, seed=seed):
        loader: Any = shard_loader(DataLoader(Noise(), batch_size=3, **options))
    loader.set_epoch(epoch)
    items = torch.cat(list(loader))
    return items[items[:, 0].argsort()]


def test_no_two_of_64_by_64_workers_begin_alike() -> None:
    """Not in 64 bits over several epochs, and within an epoch not in the 32 that numpy takes either."""
    every = []
    for epoch in range(20):
        seeds = [worker_seed(7, epoch, rank, worker, 64) for rank in range(64) for worker in range(64)]
        assert len({seed % 2**32 for seed in seeds}) == 64 * 64
        every += seeds
    every += [batch_seed(7, epoch, rank, 64, step) for epoch in range(3) for rank in range(64) for step in range(999)]
    assert len(set(every)) == len(every)


def test_other_epochs_and_seeds_are_others() -> None:
    """Neighbours have nothing in common."""
    firsts = [worker_seed(seed, epoch, 0, 0, 4) for seed, epoch in itertools.product(range(30), range(30))]
    assert len({seed % 2**32 for seed in firsts}) == 900
    assert len({seed >> 40 for seed in firsts}) > 890


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.slow("starts workers, again and again")
def test_a_rank_draws_what_it_draws(workers: int) -> None:
    """The same again in another run, and for any number of workers; other numbers on the other rank and later."""
    options: dict[str, Any] = {"num_workers": workers}
    expected = noise(1)
    assert torch.equal(noise(1, **options), expected)
    assert torch.equal(noise(1, epoch=5, **options), noise(1, epoch=5))
    others = [noise(0, **options), noise(1, epoch=1, **options), noise(1, seed=8, **options)]
    assert not any((expected[:, column] == other[:, column]).any() for other in others for column in (1, 2, 3))


def test_each_generator_is_seeded() -> None:
    """No number comes twice in an epoch, of any generator, on any rank."""
    items = torch.cat([noise(rank, 4, num_workers=2) for rank in range(4)])
    for column in (1, 2, 3):
        assert len(set(items[:, column].tolist())) == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_draw_by_the_epoch(workers: int) -> None:
    """Workers that live on draw in the second epoch what fresh ones would."""
    expected = [noise(0, epoch=epoch) for epoch in range(3)]
    with standing_on(0, 2, seed=7):
        loader: Any = shard_loader(
            DataLoader(Noise(), batch_size=3, num_workers=workers, persistent_workers=workers > 0)
        )
    assert all(torch.equal(torch.cat(list(loader)), items) for items in expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow("starts workers, again and again")
def test_augmentation_goes_on_where_it_was_cut_off(workers: int) -> None:
    """In an epoch that goes on, the batches have the random numbers that they would have had."""

    def loader_of() -> Any:
        with standing_on(1, 2, seed=7):
            return shard_loader(DataLoader(Noise(), batch_size=3, shuffle=True, num_workers=workers))

    whole, cut, again = list(loader_of()), loader_of(), loader_of()
    done = list(islice(cut, 2))
    again.load_state_dict(cut.state_dict())
    rest = list(again)
    assert all(torch.equal(a, b) for a, b in zip(done + rest, whole, strict=True))


@pytest.mark.parametrize("dataset", [Noise(), Still()])
def test_the_loops_random_numbers_are_its_own(dataset: Any) -> None:
    """Without workers too the loop draws what it would have drawn had it fetched nothing."""
    before = random_state()
    with standing_on(0, 2, seed=7):
        loader = shard_loader(DataLoader(dataset, batch_size=3))
    for _ in loader:
        pass
    assert random_state() == before


def own_init(worker: int) -> None:
    """A user's own: numpy's seed is taken over from torch's by the recipe that everybody copies."""
    numpy.random.seed(torch.initial_seed() % 2**32)
    info = get_worker_info()
    assert info is not None
    info.dataset.seen = (worker, info.seed == torch.initial_seed())  # type: ignore[union-attr]


class Marked(Noise):
    seen = (-1, False)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([*self.seen, numpy.random.rand(), random.random()], dtype=torch.float64)


def test_the_users_own_init_is_kept() -> None:
    """It runs in every worker, after the seeding; what it seeds itself is not seeded again."""
    with standing_on(0, 2, seed=7):
        loader = shard_loader(DataLoader(Marked(), batch_size=2, num_workers=2, worker_init_fn=own_init))
    rows = torch.cat(list(loader))
    assert sorted(rows[:, 0].tolist()) == [0.0] * 6 + [1.0] * 6
    assert rows[:, 1].all()
    assert loader.worker_init_fn is own_init
    with standing_on(0, 2, seed=7):
        generators = [
            numpy.random.RandomState(worker_seed(loader._sharding.seed, 0, 0, worker, 2) % 2**32)  # type: ignore[attr-defined]
            for worker in (0, 1)
        ]
    assert sorted(rows[:, 2].tolist()) == sorted(float(g.rand()) for g in generators for _ in range(6))
    assert len(set(rows[:, 3].tolist())) == 12


def drawn() -> list[float]:
    loader = shard_loader(DataLoader(Noise(), batch_size=3, num_workers=0))
    return [float(value) for batch in loader for value in batch[:, 2]]


def test_ranks_draw_apart_without_workers_too() -> None:
    """Forked ranks begin with the same random numbers, but augment differently."""
    first, second = run_ranks(drawn, 2)
    assert not set(first) & set(second)
