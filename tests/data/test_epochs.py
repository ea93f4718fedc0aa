from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SubsetRandomSampler

from distwrap import shard_loader
from tests.data.ranks import batches, interleaved, on_each_rank, standing_on

DATA: Any = list(range(24))


def order(epoch: int) -> list[int]:
    """The hand-written order of rank 0 of 2."""
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, 2, 0, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)


def shuffled(**options: Any) -> DataLoader[Any]:
    with standing_on(0, 2):
        return shard_loader(DataLoader(DATA, batch_size=12, shuffle=True, **options))


def test_epochs_advance_by_themselves() -> None:
    """Each run over the loader is the next epoch, without a call of set_epoch."""
    loader = shuffled()
    assert [batches(loader) for _ in range(3)] == [[order(epoch)] for epoch in range(3)]


def test_exact_epochs_are_shuffled_as_by_distributed_sampler() -> None:
    """In exact mode too each epoch has DistributedSampler's order, of which the ranks take turns."""
    loaders = on_each_rank(2, lambda: shard_loader(DataLoader(DATA, shuffle=True, batch_size=12), mode="exact"))
    whole: DistributedSampler[Any] = DistributedSampler(DATA, 1, 0, seed=0)
    for epoch in range(2):
        whole.set_epoch(epoch)
        assert interleaved([batches(loader)[0] for loader in loaders]) == list(whole)


def test_an_explicit_epoch_wins() -> None:
    """set_epoch says which epoch comes next, and counting goes on from there."""
    loader = shuffled()
    batches(loader)
    loader.set_epoch(5)  # type: ignore[attr-defined]
    assert [batches(loader), batches(loader)] == [[order(5)], [order(6)]]


def test_the_sampler_may_be_told_the_epoch() -> None:
    """A loop that calls loader.sampler.set_epoch, as with DistributedSampler, is heard too."""
    loader = shuffled()
    loader.sampler.set_epoch(4)  # type: ignore[attr-defined]
    assert batches(loader) == [order(4)]


def test_an_epoch_left_early_counts() -> None:
    """Leaving an epoch after a batch makes the next run the next epoch."""
    with standing_on(0, 2):
        loader = shard_loader(DataLoader(DATA, batch_size=4, shuffle=True))
    next(iter(loader))
    assert [index for batch in batches(loader) for index in batch] == order(1)


class Counting(DataLoader[Any]):
    """A loader that has a use of its own for the epoch."""

    told = -1

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


def test_a_loaders_own_set_epoch_is_called_too() -> None:
    """A subclass that wants to know the epoch is told it, and the shuffle follows it too."""
    with standing_on(0, 2):
        loader = shard_loader(Counting(DATA, batch_size=12, shuffle=True))
    loader.set_epoch(2)
    assert batches(loader) == [order(2)]
    assert loader.told == 2


def test_a_loader_used_in_one_process_before_follows_set_epoch() -> None:
    """A loader that went through shard_loader in a single process shuffles by its epoch in a world."""
    loader = shard_loader(DataLoader(DATA, batch_size=12, shuffle=True))
    with standing_on(0, 2):
        sharded = shard_loader(loader)
    sharded.set_epoch(3)  # type: ignore[attr-defined]
    assert batches(sharded) == [order(3)]


class Pairs(Sampler[list[int]]):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter([index, index + 12] for index in SubsetRandomSampler(range(12)))


LOADERS = {
    "pad": ({"shuffle": True, "batch_size": 4}, "pad"),
    "exact": ({"shuffle": True, "batch_size": 4}, "exact"),
    "sampler": ({"sampler": SubsetRandomSampler(range(20)), "batch_size": 4}, "exact"),
    "batch sampler": ({"batch_sampler": Pairs()}, "pad"),
    "exact batch sampler": ({"batch_sampler": Pairs()}, "exact"),
}


@pytest.mark.parametrize(
    ("kind", "persistent"), [(kind, index % 2 == 0) for index, kind in enumerate(LOADERS)], ids=lambda each: f"{each}"
)
@pytest.mark.slow("starts workers, again and again")
def test_workers_fetch_the_same_epochs(kind: str, persistent: bool) -> None:
    """With two workers, kept over the epochs or not, the same batches come in the same epochs as without."""
    options, mode = LOADERS[kind]
    with standing_on(0, 2):
        alone = shard_loader(DataLoader(DATA, **options), mode=mode, seed=0)  # type: ignore[arg-type]
        helped = shard_loader(
            DataLoader(DATA, **options, num_workers=2, persistent_workers=persistent),
            mode=mode,  # type: ignore[arg-type]
            seed=0,
        )
    assert [batches(helped), batches(helped)] == [batches(alone), batches(alone)]
