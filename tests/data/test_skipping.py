"""A loop that has saved a step, and no position, goes on after it: the rest is what it would have been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from distwrap import accumulate, rank, shard_loader, world_size
from distwrap.data.loops import batches_left
from distwrap.errors import LoaderError, OptionError
from distwrap.testing import run_ranks
from tests.data.ranks import batches, on_each_rank, standing_on
from tests.data.streams import Resumable


class Counted(Dataset[int]):
    """Numbers, of which it is known which were fetched."""

    def __init__(self, n: int = 23) -> None:
        self.n, self.fetched = n, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


class EveryThird(Sampler[int]):
    """An order of one's own."""

    def __iter__(self) -> Any:
        yield from torch.randperm(21).tolist()

    def __len__(self) -> int:
        return 21


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffled": ({"shuffle": True, "batch_size": 3}, {}),
    "in order, exact": ({"batch_size": 3}, {}),
    "in order, drop": ({"batch_size": 3}, {"mode": "drop"}),
    "stream order": ({"shuffle": True, "batch_size": 2}, {"order": "stream"}),
    "a sampler": ({"sampler": EveryThird(), "batch_size": 2}, {}),
    "global": ({"shuffle": True, "batch_size": 6, "drop_last": True}, {"batch_size": "global"}),
    "with replacement": ({"sampler": RandomSampler(range(23), replacement=True), "batch_size": 4}, {"mode": "pad"}),
}


def rest_after(skipped: int, kind: str, seed: int | None, epoch: int) -> tuple[list[list[int]], list[int], Any, int]:
    """Return the batches of an epoch after some, what was fetched, the position at the end, and the length before."""
    torch.manual_seed(5)
    options, how = KINDS[kind]
    dataset = Counted()
    loader = shard_loader(DataLoader(dataset, **options), seed=seed, **how)
    loader.set_epoch(epoch)  # type: ignore[attr-defined]
    assert loader.skip(skipped) is loader  # type: ignore[attr-defined]
    loader.set_epoch(epoch)  # type: ignore[attr-defined]  # as the loop says again
    left = batches_left(loader)
    state: Any = loader.state_dict()["consumed"]  # type: ignore[attr-defined]
    assert left is not None
    return batches(loader), dataset.fetched, state, left


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_rest_is_that_of_a_whole_epoch(kind: str, ranks: int, seed: int | None) -> None:
    """On every rank, in any order and epoch; nothing of what is left out is fetched."""
    for number in range(ranks):
        with standing_on(number, ranks):
            whole, *_ = rest_after(0, kind, seed, 2)
        for skipped in (1, 2, len(whole)):
            with standing_on(number, ranks):
                found, fetched, _, left = rest_after(skipped, kind, seed, 2)
            assert found == whole[skipped:], skipped
            assert fetched == [index for batch in found for index in batch]
            assert left == len(found)


def test_the_position_counts_what_was_left_out() -> None:
    """What is saved after a skip is the place in the epoch, from which another loop goes on."""
    for ranks in (1, 2):
        for number in range(ranks):
            with standing_on(number, ranks):
                loader: Any = shard_loader(DataLoader(range(24), batch_size=2))
                loader.skip(2)
                assert loader.state_dict()["consumed"] == 4 * ranks
                given = iter(loader)
                first = next(given)
                assert loader.state_dict()["consumed"] == 6 * ranks
                again: Any = shard_loader(DataLoader(range(24), batch_size=2))
                again.load_state_dict(loader.state_dict())
                assert batches(again) == [batch.tolist() for batch in given]
                assert first.tolist() == [number + ranks * 4, number + ranks * 5]
                again.skip(1)
                assert again.state_dict()["epoch"] == 1
                assert batches(again) == batches(loader)[1:]


def test_only_the_next_iteration_is_shorter() -> None:
    """The epochs after it are whole."""
    for ranks in (1, 2):
        with standing_on(0, ranks):
            loader: Any = shard_loader(DataLoader(range(12), batch_size=2))
            whole = batches(loader)
            assert batches(loader.skip(1).skip(1)) == whole[2:]
            assert batches(loader) == whole


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_epoch_may_be_said_after_the_skip(ranks: int) -> None:
    """As a loop says it that goes on at its epoch; the one after it is whole."""
    with standing_on(0, ranks):
        loader: Any = shard_loader(DataLoader(range(12), batch_size=2, shuffle=True), seed=3)
        wholes = [batches(loader) for _ in range(11)]
        loader.skip(1)
        for epoch, skipped in ((9, 1), (10, 0)):
            loader.set_epoch(epoch)
            assert batches(loader) == wholes[epoch][skipped:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_after_a_saved_position_is_whole(ranks: int) -> None:
    """What was skipped from there belongs to the position's own epoch."""
    with standing_on(0, ranks):
        loader: Any = shard_loader(DataLoader(range(12), batch_size=2))
        whole = batches(loader)
        loader.load_state_dict({**loader.state_dict(), "consumed": 2 * ranks})
        loader.skip(1)
        loader.set_epoch(9)
        assert batches(loader) == whole


@pytest.mark.slow("starts workers, again and again")
def test_a_loader_with_workers_skips_too() -> None:
    """Also one that keeps its workers: these have fetched ahead, or are not asked."""

    def on_rank(keeps: bool) -> list[list[int]]:
        loader: Any = shard_loader(DataLoader(range(16), batch_size=2, num_workers=1, persistent_workers=keeps))
        whole = batches(loader)
        assert batches(loader.skip(2)) == whole[2:]
        assert batches(loader) == whole
        return whole

    for keeps in (False, True):
        for ranks in (1, 2):
            assert len(run_ranks(on_rank, ranks, keeps, timeout=60)) == ranks


class Stream(IterableDataset[int]):
    """The numbers up to n."""

    def __iter__(self) -> Any:
        return iter(range(17))


@pytest.mark.parametrize("dataset", [Stream(), Resumable(17)])
def test_a_stream_is_read_up_to_there(dataset: IterableDataset[int]) -> None:
    """An iterable dataset gives what it gives after so many batches, on ranks in step and alone."""

    def on_rank() -> list[list[int]]:
        loader: Any = shard_loader(DataLoader(dataset, batch_size=2), split="items")
        whole = batches(loader)
        assert batches(loader.skip(2)) == whole[2:]
        assert batches(loader.skip(8 // world_size())) == whole[8 // world_size() :]
        assert batches(loader) == whole
        return whole

    for ranks in (1, 2):
        assert sum(map(len, run_ranks(on_rank, ranks)), 0) >= 8


def test_windows_are_those_of_what_is_left() -> None:
    """`accumulate` knows how many batches come after a skip."""
    for ranks in (1, 2):

        def sizes() -> list[int]:
            loader: Any = shard_loader(DataLoader(range(10 * world_size()), batch_size=2))
            return [window.size for _, window in accumulate(loader.skip(2), 2, torch.nn.Linear(1, 1))]

        assert on_each_rank(ranks, sizes) == [[2, 2, 1]] * ranks


def test_what_cannot_be_left_out_is_refused() -> None:
    """More batches than an epoch has, and what is no number of them."""
    for ranks in (1, 2):
        with standing_on(0, ranks):
            loader: Any = shard_loader(DataLoader(range(8), batch_size=2))
            count = 4 // ranks
            with pytest.raises(
                LoaderError, match=rf"skip\({count + 1}\): the next epoch of this loader has {count} batch"
            ):
                loader.skip(count + 1)
            with pytest.raises(OptionError, match="whole number"):
                loader.skip(-1)
            assert batches(loader.skip(count)) == []
            loader.skip(count - 1)
            with pytest.raises(LoaderError, match=r"skip\(2\)"):
                loader.skip(2)
            assert rank() == 0
