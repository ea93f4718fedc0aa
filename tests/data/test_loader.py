from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset

from distwrap import shard_loader
from distwrap.errors import LoaderError, OptionError
from tests.data.ranks import batches, on_each_rank, standing_on


def by_hand(n: int, rank: int, world_size: int, batch_size: int, **of_sampler: Any) -> DataLoader[int]:
    """The loader that a careful user writes."""
    data = list(range(n))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=0, **of_sampler)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=batch_size, sampler=sampler)  # type: ignore[arg-type]


def loader_of(n: int, **options: Any) -> DataLoader[int]:
    return DataLoader(list(range(n)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["pad", "drop"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_those_of_a_hand_written_distributed_sampler(shuffle: bool, mode: Any) -> None:
    """Over two epochs the batches are bit for bit those of a loop with DistributedSampler(seed=0) and set_epoch."""
    for n, world_size, batch_size in ((1, 2, 1), (2, 3, 2), (7, 2, 3), (7, 3, 2), (12, 3, 2), (25, 5, 3)):
        for rank in (0, world_size - 1):
            hand = by_hand(n, rank, world_size, batch_size, shuffle=shuffle, drop_last=mode == "drop")
            with standing_on(rank, world_size):
                ours = shard_loader(loader_of(n, batch_size=batch_size, shuffle=shuffle), mode=mode)
            assert len(ours) == len(hand)
            for epoch in range(2):
                hand.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                assert batches(ours) == batches(hand)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("n", "world_size", "batch_size"), [(1, 2, 3), (7, 3, 2), (12, 2, 3), (13, 5, 1)])
def test_exact_mode_takes_each_index_once(n: int, world_size: int, batch_size: int, shuffle: bool) -> None:
    """The ranks together see each index once, of any order; test_indices.py shows it for all sizes."""
    loader = loader_of(n, batch_size=batch_size, shuffle=shuffle)
    taken = on_each_rank(world_size, lambda: batches(shard_loader(loader, mode="exact")))
    assert sorted(index for steps in taken for batch in steps for index in batch) == list(range(n))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("n", "world_size", "batch_size"), [(2, 2, 3), (7, 3, 2), (12, 2, 3), (13, 5, 1)])
def test_exact_mode_keeps_the_ranks_in_step(n: int, world_size: int, batch_size: int, drop_last: bool) -> None:
    """All ranks take the same number of batches, and it is the loader's length."""
    loader = loader_of(n, batch_size=batch_size, drop_last=drop_last)
    counts = on_each_rank(
        world_size, lambda: (len(batches(sharded := shard_loader(loader, mode="exact"))), len(sharded))
    )
    assert len({number for pair in counts for number in pair}) == 1


def test_a_loader_of_which_no_rank_gets_a_full_batch_is_refused() -> None:
    """With drop_last, where one process would have batches and a rank has none."""
    with standing_on(0, 3), pytest.raises(LoaderError, match="no step"):
        shard_loader(loader_of(4, batch_size=2, drop_last=True), mode="exact")


def test_auto_mode_pads_what_shuffles() -> None:
    """A loader that shuffles gives all ranks equally many samples, and so repeats some."""
    taken = on_each_rank(2, lambda: batches(shard_loader(loader_of(5, batch_size=4, shuffle=True))))
    seen = Counter(index for steps in taken for batch in steps for index in batch)
    assert set(seen) == set(range(5))
    assert sum(seen.values()) == 6


def test_auto_mode_is_exact_where_the_order_is_fixed() -> None:
    """A loader that does not shuffle, as for evaluation, gives each sample once."""
    taken = on_each_rank(2, lambda: batches(shard_loader(loader_of(5, batch_size=2))))
    assert taken == [[[0, 2, 4]], [[1, 3]]]


@pytest.mark.parametrize("mode", ["pad", "exact", "drop"])
def test_drop_last_holds_in_every_mode(mode: Any) -> None:
    """With drop_last each rank takes full batches only, and all of them equally many."""
    loader = loader_of(23, batch_size=4, drop_last=True, shuffle=True)
    taken = on_each_rank(3, lambda: batches(shard_loader(loader, mode=mode)))
    assert [[len(batch) for batch in steps] for steps in taken] == [[4] if mode != "pad" else [4, 4]] * 3


def test_the_runs_seed_shuffles() -> None:
    """The run's seed is the shuffle's, as DistributedSampler(seed=…) would have it."""
    data = list(range(20))
    hand = DistributedSampler(data, 2, 1, seed=7)  # type: ignore[arg-type]
    with standing_on(1, 2, seed=7):
        ours = shard_loader(loader_of(20, batch_size=10, shuffle=True))
    assert batches(ours) == [list(hand)]


def test_an_explicit_seed_goes_before_the_runs() -> None:
    """A seed given to shard_loader is taken, 0 too."""
    data = list(range(20))
    hand = DistributedSampler(data, 2, 1, seed=0)  # type: ignore[arg-type]
    with standing_on(1, 2, seed=7):
        ours = shard_loader(loader_of(20, batch_size=10, shuffle=True), seed=0)
    assert batches(ours) == [list(hand)]


def test_a_sequential_sampler_of_fewer_items_is_kept() -> None:
    """A sampler that runs over a part of the dataset is not widened to all of it."""
    loader = loader_of(10, sampler=SequentialSampler(range(4)), batch_size=2)
    assert on_each_rank(2, lambda: batches(shard_loader(loader))) == [[[0, 2]], [[1, 3]]]


def test_the_given_loader_is_not_changed() -> None:
    """Sharding makes another loader: the one handed over still yields everything."""
    loader = loader_of(6, batch_size=2)
    with standing_on(0, 2):
        shard_loader(loader)
    assert batches(loader) == [[0, 1], [2, 3], [4, 5]]


class Named(DataLoader[Any]):
    """A subclass as users write them: another constructor, an attribute, an iterator of its own."""

    def __init__(self, name: str, n: int) -> None:
        super().__init__(list(range(n)), batch_size=2)  # type: ignore[arg-type]
        self.name = name

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return ((self.name, batch.tolist()) for batch in super().__iter__())


def test_a_subclass_stays_what_it_is() -> None:
    """A DataLoader subclass keeps its class, its attributes and its own iterator."""
    with standing_on(1, 2):
        ours = shard_loader(Named("train", 4))
    assert isinstance(ours, Named)
    assert ours.name == "train"
    assert list(ours) == [("train", [1, 3])]


def test_options_of_the_loader_are_kept() -> None:
    """What the user asked of the loader, as collate_fn and batch_size, is asked of its share."""
    loader = loader_of(8, batch_size=2, collate_fn=sum)
    with standing_on(0, 2):
        ours = shard_loader(loader)
    assert ours.batch_size == 2
    assert list(ours) == [0 + 2, 4 + 6]


def test_an_already_distributed_loader_is_left_alone() -> None:
    """A loader with a DistributedSampler for this very rank comes back as it is."""
    loader = by_hand(10, 1, 2, 2)
    with standing_on(1, 2):
        assert shard_loader(loader) is loader


def test_a_loader_distributed_for_another_world_is_refused() -> None:
    """A DistributedSampler of another rank or world would lose data in silence, so it is refused."""
    with standing_on(1, 4), pytest.raises(LoaderError, match="for rank 1 of 2"):
        shard_loader(by_hand(10, 1, 2, 2))


class HomeMade(SequentialSampler):
    """A distributed sampler that does not inherit torch's, as several libraries have."""

    def __init__(self, n: int, num_replicas: int, rank: int) -> None:
        super().__init__(range(n))
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self), self.num_replicas))


def test_a_distributed_sampler_of_another_make_is_left_alone() -> None:
    """A sampler that names its num_replicas and rank takes a share already, and no share is taken of that."""
    loader = loader_of(8, sampler=HomeMade(8, 2, 1))
    with standing_on(1, 2):
        assert shard_loader(loader) is loader


def test_sharding_twice_is_sharding_once() -> None:
    """A loader that is this rank's share already comes back as it is."""
    with standing_on(0, 2):
        once = shard_loader(loader_of(8))
        assert shard_loader(once) is once


def test_a_share_for_another_world_is_refused() -> None:
    """A loader that was sharded for another rank is refused, as it would lose data in silence."""
    with standing_on(0, 2):
        once = shard_loader(loader_of(8))
    with standing_on(1, 2), pytest.raises(LoaderError, match="for rank 0 of 2"):
        shard_loader(once)


def test_one_process_on_the_cpu_gets_the_loader_itself() -> None:
    """In a single process sharding changes nothing, whatever was asked."""
    loader = loader_of(7, batch_size=3, shuffle=True)
    assert shard_loader(loader, mode="drop", batch_size="global", seed=3) is loader


def test_one_process_may_call_set_epoch() -> None:
    """A loop that calls set_epoch runs in a single process too."""
    loader = shard_loader(loader_of(3))
    loader.set_epoch(1)  # type: ignore[attr-defined]
    assert batches(loader) == [[0], [1], [2]]


def test_batches_go_to_the_device() -> None:
    """Tensors in a batch come out on the asked device."""
    loader = shard_loader(loader_of(4, batch_size=2), device="meta")
    assert [batch.device for batch in loader] == [torch.device("meta")] * 2


def test_a_loader_moved_to_a_device_can_still_be_sharded() -> None:
    """A loader prepared by one process for its device takes a share once it is used in a world."""
    moved = shard_loader(loader_of(4, batch_size=2), device="meta")
    with standing_on(1, 2):
        ours = shard_loader(moved)
    assert batches(ours) == [[1, 3]]


def test_global_batch_size_is_divided() -> None:
    """batch_size="global" divides the loader's batch size among the ranks."""
    loader = loader_of(12, batch_size=6)
    taken = on_each_rank(3, lambda: batches(shard_loader(loader, batch_size="global")))
    assert taken == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]


@pytest.mark.parametrize(("size", "advice"), [(7, "6 or 9"), (2, "3")])
def test_a_global_batch_size_that_does_not_divide_is_refused(size: int, advice: str) -> None:
    """A global batch size that leaves a rest is refused, with the nearest ones that do not."""
    with standing_on(0, 3), pytest.raises(LoaderError, match=f"Make it {advice}"):
        shard_loader(loader_of(12, batch_size=size), batch_size="global")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_an_iterable_dataset_is_fine_in_one_process() -> None:
    """In a single process there is nothing to share out, so any loader will do."""
    loader = DataLoader(Stream())
    assert shard_loader(loader) is loader


def test_what_is_no_loader_is_refused() -> None:
    """Anything but a DataLoader is refused by its type's name."""
    with pytest.raises(LoaderError, match="not a list"):
        shard_loader([1, 2])  # type: ignore[type-var]
    with pytest.raises(LoaderError, match="Put the dataset"):
        shard_loader(TensorDataset(torch.ones(2)))  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("option", "message"), [({"mode": "exakt"}, "'exact'"), ({"batch_size": "per-rank"}, "'per_rank'")]
)
def test_a_misspelt_option_names_the_nearest(option: dict[str, Any], message: str) -> None:
    """A wrong word lists the right ones, in a single process too."""
    with pytest.raises(OptionError, match=message):
        shard_loader(loader_of(2), **option)


def test_a_sharded_loader_can_be_pickled() -> None:
    """A sharded loader goes to another process and yields the same there."""
    with standing_on(1, 2):
        ours = shard_loader(loader_of(8, batch_size=2, shuffle=True))
    there = pickle.loads(pickle.dumps(ours))
    assert type(there) is type(ours)
    assert batches(there) == batches(ours)
