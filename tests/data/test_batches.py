"""What comes between the loader and the loop: each sample is fetched once, when it is its turn, or its error raised."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, Subset

from distwrap import gather, rank, shard_loader
from distwrap.errors import LoaderError
from distwrap.testing import run_ranks
from tests.data.ranks import batches, on_each_rank, standing_on


class Corrupt(Dataset[int]):
    """Two of its samples cannot be loaded."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index in (4, 5):
            raise OSError("corrupt")
        return index


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_may_go_on_after_a_sample_that_fails(ranks: int, workers: int) -> None:
    """As with torch's own iterator, only the batch with the sample is lost, and the position is after it."""

    def taken() -> list[int]:
        loader: Any = shard_loader(DataLoader(Corrupt(), batch_size=2 // ranks, num_workers=workers))
        given, found = iter(loader), []
        while True:
            try:
                found += next(given).tolist()
            except OSError:
                assert loader.state_dict()["consumed"] == 6
            except StopIteration:
                return found

    shares = on_each_rank(ranks, taken)
    assert sorted(chain(*shares)) == [index for index in range(16) if index not in (4, 5)]


class Stock(Dataset[int]):
    """Gives what it has, and draws a number where it is late."""

    def __init__(self) -> None:
        self.stock = list(range(100))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index >= 12:
            random.random()
        return self.stock.pop(0)


def test_no_sample_is_fetched_twice() -> None:
    """Also where the dataset first draws random numbers after batches that drew none."""
    for world_size in (1, 2):
        with standing_on(0, world_size):
            loader = shard_loader(DataLoader(Stock(), batch_size=2))
        assert list(chain(*batches(loader))) == list(range(24 // world_size))


class Levels(Sampler[int]):
    """Yields the level that the loop has reached."""

    level = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        for _ in range(16):
            yield self.level


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_may_follow_the_loop(ranks: int) -> None:
    """Nothing is drawn ahead of the step that it is for."""
    sampler = Levels()
    with standing_on(0, ranks):
        loader = shard_loader(DataLoader(range(100), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    seen = []
    for step, batch in enumerate(loader, 1):
        seen.append(int(batch[0]))
        sampler.level = step
    assert seen == list(range(8 // ranks))


def test_a_sampler_may_wait_for_the_loop() -> None:
    """One that is fed by the loop, and has no end, gives the items of a step and waits for no others."""
    fed: queue.Queue[list[int]] = queue.Queue()

    class Fed(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            while True:
                yield fed.get_nowait()

    with standing_on(1, 2):
        loader = shard_loader(DataLoader(range(100), batch_sampler=Fed()), mode="drop")  # type: ignore[arg-type]
    fed.put([0])
    fed.put([1])
    seen = []
    for batch in islice(loader, 5):
        seen += batch.tolist()
        fed.put([0])
        fed.put([1 + seen[-1]])
    assert seen == [1, 2, 3, 4, 5]


def follows(whose: str) -> int:
    sampler = Levels()
    steps = 0
    for _ in shard_loader(DataLoader(range(100), batch_size=1, sampler=sampler)):  # type: ignore[arg-type]
        dist.all_reduce(torch.ones(1))  # as training does
        steps += 1
        sampler.level = steps if whose == "all" else steps * rank()
    return steps


def test_a_sampler_that_follows_one_rank_is_told() -> None:
    """Where each rank feeds it its own losses the orders differ in the epoch, and the shares overlap."""
    assert run_ranks(follows, 2, "all") == [8, 8]
    with pytest.raises(LoaderError, match="different orders"):
        run_ranks(follows, 2, "its own")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_may_grow_between_epochs(shuffle: bool) -> None:
    """What it has when an epoch begins is gone through."""
    for world_size in (1, 2):
        part = Subset(range(100), list(range(8)))  # type: ignore[arg-type]
        loaders = on_each_rank(world_size, lambda: shard_loader(DataLoader(part, batch_size=2, shuffle=shuffle)))  # noqa: B023
        for size in (8, 12, 16):
            part.indices = list(range(size))
            assert {len(loader) for loader in loaders} == {size // 2 // world_size}
            assert sorted(chain(*map(indices_of, loaders))) == part.indices


class Whole(Dataset[torch.Tensor]):
    """Fetches a batch at once."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, indices: Any) -> torch.Tensor:
        return torch.tensor(indices)


def indices_of(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_batch_sampler_in_the_samplers_place_is_cut_anew(kind: Any, ranks: int) -> None:
    """A dataset that fetches a batch at once is divided as any other, and goes on from any number of ranks."""

    def sharded() -> Any:
        sampler = BatchSampler(kind(range(22)), 4, False)
        return shard_loader(DataLoader(Whole(), batch_size=None, sampler=sampler), mode="exact")

    loaders = on_each_rank(ranks, sharded)
    shares = [indices_of(islice(loader, 1)) for loader in loaders]
    assert [len(share) for share in shares] == [4] * ranks
    again = on_each_rank(2, sharded)
    for loader in again:
        loader.load_state_dict(loaders[0].state_dict())
    assert sorted(chain(*shares, *map(indices_of, again))) == list(range(22))


def shuffled_by_one_generator() -> tuple[int, int]:
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "generator": generator}
    one, other = (shard_loader(DataLoader(range(64), **options)) for _ in range(2))  # type: ignore[arg-type]
    alike = sum(int((x == y).sum()) for x, y in zip(one, other, strict=True))
    orders = {
        tuple(torch.cat(list(shard_loader(DataLoader(range(64), **options)))).tolist())  # type: ignore[arg-type]
        for _ in range(4)
    }
    return alike, len(orders)


def test_loaders_with_one_generator_have_orders_of_their_own() -> None:
    """Two loaders over one generator, and one that is made anew in each epoch, as in one process."""
    for alike, orders in on_each_rank(2, shuffled_by_one_generator):
        assert alike < 16
        assert orders == 4


class Marked(DataLoader[Any]):
    """A loader with an attribute and a method of its own, which looks at its dataset."""

    marks = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self.marks += 1
            yield batch + len(self.dataset) + self.dataset[0]  # type: ignore[arg-type]

    def marked(self) -> int:
        return self.marks


def test_a_sharded_loader_is_the_users_loader_too() -> None:
    """Its attributes and methods are there, may be changed, and those of its dataset are the user's."""
    for world_size in (1, 2):
        with standing_on(0, world_size):
            loader: Any = shard_loader(Marked(range(1, 9), batch_size=8 // world_size))  # type: ignore[arg-type]
        assert isinstance(loader, Marked)
        assert isinstance(loader, DataLoader)
        assert loader.dataset == range(1, 9)
        assert [len(batch) for batch in loader] == [8 // world_size]
        assert next(iter(loader))[0] == 1 + 8 + 1
        assert loader.marked() == 2
        loader.marks = 7
        loader.collate_fn = sum
        assert [int(batch) for batch in loader] == [sum(range(1, 9, world_size)) + 9]
        assert loader.marked() == 8


def test_a_default_device_is_not_the_workers() -> None:
    """What workers read of the epoch is in the CPU's memory, whatever the loop's device."""
    with standing_on(0, 2):
        loader: Any = shard_loader(DataLoader(range(8)))  # type: ignore[arg-type]
        loader._sharding.told = None
        torch.set_default_device("meta")
        try:
            loader._put_fetching()
        finally:
            torch.set_default_device(None)
    assert loader._sharding.told.tolist() == [0, 0]


WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from distwrap import distributed, gather_object, shard_loader

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0).split(1))

@distributed(nprocs=2, launcher="fork")
def main():
    part = Subset(range(9), list(range(8)))
    loaders = [
        shard_loader(DataLoader(part, batch_size=2, shuffle=True, generator=torch.Generator())),
        shard_loader(DataLoader(Stream(), batch_size=2), split="dispatch"),
        shard_loader(DataLoader(Stream(), batch_size=2)),
    ]
    seen = [gather_object([float(i) for batch in loader for i in batch.flatten()]) for loader in loaders]
    return [sorted(sum(shares, [])) for shares in seen]

if __name__ == "__main__":
    assert main() == [list(range(8))] * 3
"""


def test_numpy_is_not_needed(tmp_path: Path) -> None:
    """Generators, subsets, streams and dispatch work without it."""
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_NUMPY)
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)


def test_shares_add_up_on_real_ranks() -> None:
    """An evaluation over batches of a dataset that fetches them at once adds up to one process's."""

    def counted() -> int:
        loader = shard_loader(
            DataLoader(Whole(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(22)), 4, False))
        )
        return len(gather(torch.cat(list(loader))))

    assert run_ranks(counted, 2) == [22, 22]
