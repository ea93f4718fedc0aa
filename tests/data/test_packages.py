"""Loaders and datasets of other packages, the real ones: each sample once, and on from where a run was cut off."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from distwrap import rank, shard_loader
from distwrap.errors import LoaderError
from distwrap.testing import run_ranks
from tests.data.ranks import standing_on

# torch and torchdata do not agree on a name that does nothing
pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")

datasets = pytest.importorskip("datasets")
webdataset = pytest.importorskip("webdataset")
stateful = pytest.importorskip("torchdata.stateful_dataloader")
samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

N = 24


def flat(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in torch.as_tensor(batch).reshape(-1)]


# torchdata


def stateful_loader(r: int, workers: int, iterable: bool = False, world_size: int = 2) -> Any:
    dataset: Any = datasets.Dataset.from_dict({"x": list(range(N))}).to_iterable_dataset(4) if iterable else range(N)
    collate: Any = (lambda rows: torch.tensor([row["x"] for row in rows])) if iterable else None
    loader = stateful.StatefulDataLoader(
        dataset, batch_size=2, shuffle=None if iterable else True, num_workers=workers, collate_fn=collate
    )
    with standing_on(r, world_size):
        return shard_loader(loader, mode="exact")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_has_a_state_before_its_first_epoch(workers: int) -> None:
    """Over an iterable dataset too, where torchdata makes the iterator of the first epoch for it."""
    loader = stateful_loader(1, workers, iterable=True)
    state = loader.state_dict()
    again = stateful_loader(1, workers, iterable=True)
    again.load_state_dict(state)
    assert flat(loader) == flat(again)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader(workers: int) -> None:
    """torchdata's loader keeps its class; its position is the loop's, and good for another number of ranks."""
    seen = []
    for r in range(2):
        cut = stateful_loader(r, workers)
        assert isinstance(cut, stateful.StatefulDataLoader)
        seen += flat(islice(cut, 3))
        state = cut.state_dict()
    del cut  # it keeps its workers until it is gone
    assert state["consumed"] == 12
    for r in range(3):
        again = stateful_loader(r, workers, world_size=3)
        again.load_state_dict(state)
        seen += flat(again)
    assert sorted(seen) == list(range(N))


def test_a_stateful_loader_of_a_single_process() -> None:
    """There its own state is its state; nothing is changed."""
    theirs: Any = stateful.StatefulDataLoader(range(N), batch_size=2)
    ours: Any = shard_loader(stateful.StatefulDataLoader(range(N), batch_size=2))
    assert flat(islice(theirs, 3)) == flat(islice(ours, 3))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    again: Any = shard_loader(stateful.StatefulDataLoader(range(N), batch_size=2))
    again.load_state_dict(ours.state_dict())
    assert flat(again) == list(range(6, N))


def test_a_stateful_loader_with_a_sampler_of_a_share() -> None:
    """It asks its own sampler for its place, also on several ranks: its own state is its state."""

    def made() -> Any:
        sampler = samplers.StatefulDistributedSampler(range(N), 2, 1, shuffle=False)
        return stateful.StatefulDataLoader(range(N), batch_size=2, sampler=sampler)

    theirs = made()
    with standing_on(1, 2):
        ours, again = shard_loader(made()), shard_loader(made())
    assert flat(islice(ours, 3)) == flat(islice(theirs, 3)) == [1, 3, 5, 7, 9, 11]
    assert ours.state_dict() == theirs.state_dict()
    again.load_state_dict(ours.state_dict())
    assert flat(again)[:2] == [13, 15]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow("imports other packages of data")
def test_a_stateful_loader_over_an_iterable_dataset(workers: int) -> None:
    """It knows the position where nobody else does: what workers fetched ahead is not lost."""
    seen = []
    for r in range(2):
        cut = stateful_loader(r, workers, iterable=True)
        seen += flat(islice(cut, 3))
        state = cut.state_dict()
        again = stateful_loader(r, workers, iterable=True)
        again.load_state_dict(state)
        seen += flat(again)
    assert sorted(seen) == list(range(N))


# datasets


def of_map(shuffle: bool) -> list[int]:
    table = datasets.Dataset.from_dict({"x": list(range(N))}).with_format("torch")
    loader = shard_loader(DataLoader(table, batch_size=4, shuffle=shuffle), mode="exact")
    return flat(batch["x"] for batch in loader)


@pytest.mark.slow("imports other packages of data")
def test_a_map_dataset() -> None:
    """A datasets.Dataset has indices, and is shared out by them."""
    for shuffle in (False, True):
        assert sorted(itertools.chain(*run_ranks(of_map, 2, shuffle, timeout=60))) == list(range(N))


def of_iterable(shards: int, workers: int, split_before: bool) -> list[list[int]]:
    from datasets.distributed import split_dataset_by_node

    from distwrap import world_size

    stream = (
        datasets.Dataset.from_dict({"x": list(range(N))}).to_iterable_dataset(shards).shuffle(seed=1, buffer_size=8)
    )
    if split_before:
        stream = split_dataset_by_node(stream, rank(), world_size())
    loader = shard_loader(DataLoader(stream, batch_size=4, num_workers=workers), mode="exact")
    return [flat(batch["x"] for batch in loader) for _ in range(2)]


@pytest.mark.parametrize(
    ("shards", "workers", "split_before"), [(1, 0, False), (4, 0, False), (4, 2, False), (3, 0, False), (4, 0, True)]
)
@pytest.mark.slow("imports other packages of data")
def test_an_iterable_dataset(shards: int, workers: int, split_before: bool) -> None:
    """A datasets.IterableDataset is split by its own means, once; its shuffle is another in the next epoch."""
    taken = run_ranks(of_iterable, 2, shards, workers, split_before, timeout=60)
    for epoch in range(2):
        assert sorted(taken[0][epoch] + taken[1][epoch]) == list(range(N))
    assert taken[0][0] != taken[0][1]


def test_an_iterable_datasets_own_position() -> None:
    """Without workers its own state is the position."""

    def loader_of() -> Any:
        stream = datasets.Dataset.from_dict({"x": list(range(N))}).to_iterable_dataset(4)
        with standing_on(1, 2):
            return shard_loader(DataLoader(stream, batch_size=2), mode="exact")

    whole = flat(batch["x"] for batch in loader_of())
    cut, again = loader_of(), loader_of()
    done = flat(batch["x"] for batch in islice(cut, 3))
    again.load_state_dict(cut.state_dict())
    assert done + flat(batch["x"] for batch in again) == whole


# webdataset


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four tar files of six samples each."""
    folder: Path = tmp_path_factory.mktemp("shards")
    for number in range(4):
        with tarfile.open(folder / f"part-{number}.tar", "w") as archive:
            for index in range(6 * number, 6 * number + 6):
                data = str(index).encode()
                member = tarfile.TarInfo(f"{index:04d}.txt")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return str(folder / "part-{0..3}.tar")


def numbers(samples: Any) -> Iterator[int]:
    for sample in samples:
        yield int(sample["txt"])


def of_shards(urls: str, kind: str, workers: int) -> list[int]:
    if kind == "split":
        pipeline = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.split_by_node)
    elif kind == "pipeline":
        stages = [webdataset.SimpleShardList(urls), webdataset.split_by_worker, webdataset.tarfile_to_samples()]
        pipeline = webdataset.DataPipeline(*stages)
    else:
        pipeline = webdataset.WebDataset(urls, shardshuffle=False)
    pipeline = pipeline.compose(numbers)
    return flat(shard_loader(DataLoader(pipeline, batch_size=4, num_workers=workers), mode="exact"))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "split", "pipeline"])
@pytest.mark.slow("imports other packages of data")
def test_a_webdataset(shards: str, kind: str, workers: int) -> None:
    """Its shards are split among ranks and workers, by its own splitter or, where there is none, by ours."""
    taken = run_ranks(of_shards, 2, shards, kind, workers, timeout=60)
    assert sorted(taken[0] + taken[1]) == list(range(N))
    assert len(taken[0]) == 12


# it leaves files to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_webdataset_that_resamples(shards: str) -> None:
    """Endless random shards are every rank's own already."""
    pipeline = webdataset.WebDataset(shards, resampled=True, shardshuffle=False).compose(numbers)
    with standing_on(0, 2):
        loader = shard_loader(DataLoader(pipeline.with_epoch(40), batch_size=4), mode="exact")
    assert len(flat(loader)) == 40


def test_what_cannot_be_split(shards: str) -> None:
    """A pipeline that begins with something else, and webdataset's own loader, are refused with what to write."""
    pipeline = webdataset.DataPipeline(lambda: iter([{"url": "x"}]))
    with standing_on(0, 2), pytest.raises(LoaderError, match="split_by_node"):
        shard_loader(DataLoader(pipeline))
    with standing_on(0, 2), pytest.raises(LoaderError, match=r"\.pipeline"):
        shard_loader(webdataset.WebLoader(webdataset.WebDataset(shards, shardshuffle=False), batch_size=4))
