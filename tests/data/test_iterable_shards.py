"""Iterable datasets: each item on one rank and in one worker, however the dataset divides them or does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from distwrap import gather, lockstep, rank, shard_loader, world_size
from distwrap.errors import LoaderError
from distwrap.testing import run_ranks
from tests.data.ranks import standing_on
from tests.data.streams import Resumable
from tests.slow import INTERPRETERS

N = 26


class Plain(IterableDataset[int]):
    """Knows of nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class ByWorker(IterableDataset[int]):
    """Divides its items among the loader's workers, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            yield from range(N)
        else:
            yield from range(info.id, N, info.num_workers)


class ByInit(IterableDataset[int]):
    """Is divided by the loader's init function, as torch's documentation shows too."""

    def __init__(self) -> None:
        self.first, self.step = 0, 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, N, self.step))


def divide(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.first, dataset.step = info.id, info.num_workers


class Late(IterableDataset[int]):
    """Asks for its worker when it is too late."""

    def __iter__(self) -> Iterator[int]:
        yield 0
        info = get_worker_info()
        yield from range(1, N, 1 if info is None else info.num_workers)


class ByRank(IterableDataset[int]):
    """Takes its rank's part itself."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        return islice(range(N), rank() * workers + worker, None, world_size() * workers)


class Epochs(Plain):
    """Wants to know the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * N)


def items_of(make: Callable[[], Any], options: dict[str, Any], sharding: dict[str, Any], epochs: int = 1) -> list[Any]:
    loader = shard_loader(DataLoader(make(), **options), **sharding)
    return [[int(item) for batch in loader for item in torch.as_tensor(batch).reshape(-1)] for _ in range(epochs)]


@pytest.mark.parametrize(("make", "workers"), [(Plain, 0), (Plain, 2), (ByWorker, 0), (ByWorker, 2), (ByInit, 2)])
def test_each_item_once(make: Any, workers: int) -> None:
    """Whether the dataset divides its items among workers or not, each comes once over all ranks and workers."""
    options = {"batch_size": 4, "num_workers": workers, "worker_init_fn": divide if make is ByInit else None}
    taken = run_ranks(items_of, 3, make, options, {"mode": "exact"}, 2)
    for epoch in range(2):
        assert sorted(item for share in taken for item in share[epoch]) == list(range(N))


@pytest.mark.slow(INTERPRETERS)
def test_spawned_workers_too() -> None:
    """Workers that are fresh interpreters are told the same."""
    options = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": "spawn"}
    taken = run_ranks(items_of, 2, ByWorker, options, {"mode": "exact"}, timeout=90)
    assert sorted(item for share in taken for item in share[0]) == list(range(N))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_divides_itself(workers: int) -> None:
    """Its code speaks of ranks, so it is asked for; said, no share is taken of its share."""
    options = {"batch_size": 4, "num_workers": workers}
    with standing_on(0, 2), pytest.raises(LoaderError, match="whether it takes"):
        shard_loader(DataLoader(ByRank()))
    taken = run_ranks(items_of, 2, ByRank, options, {"mode": "exact", "split": "dataset"})
    assert sorted(item for share in taken for item in share[0]) == list(range(N))


def test_a_dataset_that_asks_too_late() -> None:
    """What cannot be divided without loss is an error, and no wrong result."""
    options = {"batch_size": 4, "num_workers": 2}
    with pytest.raises(LoaderError, match="after its first item"):
        run_ranks(items_of, 2, Late, options, {"mode": "exact"})


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_the_epoch_is_seen(options: dict[str, Any]) -> None:
    """set_epoch of the dataset is called where it is iterated over, also in workers that live on."""
    for share in run_ranks(items_of, 2, Epochs, {"batch_size": 2, **options}, {"mode": "exact"}, 3):
        assert [set(epoch) for epoch in share] == [{0}, {1}, {2}]


def test_batch_size_none() -> None:
    """Items that come one by one are divided one by one."""
    taken = run_ranks(items_of, 2, Plain, {"batch_size": None}, {"mode": "exact"})
    assert [share[0] for share in taken] == [list(range(0, N, 2)), list(range(1, N, 2))]


class Uneven(IterableDataset[torch.Tensor]):
    """Has other lengths on other ranks."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(6 + 4 * rank())


def steps_of(mode: str, by_hand: bool) -> list[int]:
    loader: Any = shard_loader(DataLoader(Uneven(), batch_size=2), split="dataset", mode=mode)  # type: ignore[arg-type]
    steps = []
    for batch in lockstep(loader, uneven="pad" if mode == "pad" else "shortest") if by_hand else loader:
        dist.all_reduce(torch.ones(1))  # as a training step
        steps.append(len(batch))
    return steps


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(("mode", "steps"), [("auto", 3), ("drop", 3), ("pad", 5)])
def test_uneven_ranks_end_together(mode: str, steps: int, by_hand: bool) -> None:
    """With or without the user's own lockstep, no rank waits in a step that another does not take."""
    assert [len(share) for share in run_ranks(steps_of, 2, mode, by_hand)] == [steps, steps]


def test_a_loop_that_ends_early_is_told_of_in_its_own_words(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the loader's place and its own option, and lockstep only where the user has called it."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")
    site = f"test_iterable_shards.py:{steps_of.__code__.co_firstlineno + 1}"
    for by_hand in (False, True):
        run_ranks(steps_of, 2, "auto", by_hand)
        (line,) = [line for line in capfd.readouterr().err.splitlines() if "ran out of data" in line]
        assert ("lockstep ended after step 3, when rank 0 ran out" in line and "uneven='pad'" in line) == by_hand
        assert (f"loop over the loader sharded at {site} ended after step 3, when rank 0 ran out" in line) != by_hand
        assert ("shard_loader(loader, mode='pad') would use all of it" in line) != by_hand


def ends_by_itself() -> list[float]:
    loader = shard_loader(DataLoader(Uneven(), batch_size=2), split="dataset", mode="exact")
    return sorted(gather(torch.cat(list(loader))).tolist())


def test_exact_ends_unevenly() -> None:
    """For evaluation each rank goes to its own end, and nothing is lost."""
    assert run_ranks(ends_by_itself, 2) == [sorted([*range(6), *range(10)])] * 2


def same_everywhere(split: str) -> None:
    loader: Any = shard_loader(DataLoader(Plain(), batch_size=2), split=split)  # type: ignore[arg-type]
    for _ in loader:
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("split", "warned"), [("dataset", True), ("items", False)])
def test_data_that_nobody_divides_is_noticed(
    split: str, warned: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first batches of all ranks are the same it is said, once, with where and what to do."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")
    run_ranks(same_everywhere, 2, split)
    told = capfd.readouterr().err
    assert "distwrap: loader at test_iterable_shards.py" in told
    assert told.count("are the same: the dataset seems not to be divided") == warned


def loader_over(dataset: Any, r: int = 0, **options: Any) -> Any:
    with standing_on(r, 2):
        return shard_loader(DataLoader(dataset, batch_size=None, **options), mode="exact", split="dataset")


def test_a_datasets_own_position() -> None:
    """Without workers the dataset's own state is the position, each rank's for itself."""
    cut, again = loader_over(Resumable(N)), loader_over(Resumable(N))
    done = list(islice(cut, 5))
    again.load_state_dict(cut.state_dict())
    assert done + list(again) == list(range(N))
    with pytest.raises(LoaderError, match="rank 0's"):
        loader_over(Resumable(N), 1).load_state_dict(cut.state_dict())


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [(Plain(), {}, "it has no state_dict"), (Resumable(N), {"num_workers": 1}, "its workers fetch ahead of the loop")],
)
def test_a_position_that_cannot_be_told(dataset: Any, options: dict[str, Any], why: str) -> None:
    """An honest error, which says what to use."""
    with pytest.raises(LoaderError, match=rf"{why}.*StatefulDataLoader"):
        loader_over(dataset, **options).state_dict()


class Speechless(Resumable):
    """Fails to tell its position."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.index}  # type: ignore[attr-defined]


def test_a_dataset_that_fails_to_tell_its_position() -> None:
    """Its error is raised where the position is asked for, also in lockstep, which goes on where nobody asks."""
    loader = loader_over(Speechless(4))
    assert list(lockstep(loader)) == [0, 1, 2, 3]
    asking = lockstep(loader, skip=lambda item: bool(loader.state_dict()))
    with pytest.raises(AttributeError, match="no attribute 'index'"):
        list(asking)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"split": "item"}, "unknown split 'item'. Did you mean 'items'"),
        ({"order": "stream"}, "the order of an IterableDataset is its own"),
        ({"batch_size": "global"}, "does not divide by 2 ranks"),
    ],
)
def test_options_that_do_not_fit(option: dict[str, Any], message: str) -> None:
    """They are refused with what would."""
    with standing_on(0, 2), pytest.raises(ValueError, match=message):
        shard_loader(DataLoader(Plain(), batch_size=3), **option)


def test_global_batches() -> None:
    """batch_size="global" divides the batch of an iterable dataset too."""
    with standing_on(0, 2):
        loader = shard_loader(DataLoader(Plain(), batch_size=4), batch_size="global", mode="exact")
    assert [len(batch) for batch in loader] == [2] * 6 + [1]


def test_split_is_for_iterable_datasets() -> None:
    """Where there are indices it means nothing, and says so."""
    with standing_on(0, 2), pytest.raises(LoaderError, match="is for an IterableDataset"):
        shard_loader(DataLoader(range(4)), split="items")  # type: ignore[arg-type]


def of_pipe(divides: bool, workers: int) -> list[list[int]]:
    pipe: Any = IterableWrapper(list(range(N))).shuffle()
    pipe = pipe.sharding_filter() if divides else pipe
    loader = DataLoader(pipe, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    loader = shard_loader(loader, mode="exact", split="auto" if divides else "items")
    return [[int(item) for batch in loader for item in batch] for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("divides", [True, False])
def test_a_datapipe(divides: bool, workers: int) -> None:
    """torch seeds its shuffle alike everywhere, and divides it by its sharding_filter, or every n-th is taken."""
    taken = run_ranks(of_pipe, 2, divides, workers)
    for epoch in range(2):
        assert sorted(taken[0][epoch] + taken[1][epoch]) == list(range(N))
