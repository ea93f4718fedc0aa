"""A rank's part of an iterable dataset, which has no indices to share out.

A dataset that divides its items among a loader's workers, by `get_worker_info`, is shown the workers of all ranks as
those of one loader, and so divides them among all ranks. Of a dataset that does not, every n-th item is taken. Whether
it does is seen when it is asked for its first item. The packages that know of ranks themselves split as they do.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data._utils import worker as torchs_worker

from distwrap.errors import LoaderError

Split = Literal["auto", "items", "dataset"]

# Words by which a dataset's code finds its rank; whether it then takes a share cannot be read off them.
_RANKS = {"rank", "get_rank", "local_rank", "RANK", "LOCAL_RANK", "SLURM_PROCID", "process_index"}
_RANKS |= {"world_size", "get_world_size", "WORLD_SIZE", "num_replicas", "num_processes"}
_RANKS |= {"split_by_node", "split_dataset_by_node"}

_NOTHING: Any = object()


class Part:
    """What is handed to torch in place of an iterable dataset, where its items are taken.

    Args:
        rank: this rank.
        world_size: how many ranks.
        own: whether the dataset takes its rank's part by itself.
    """

    def __init__(self, rank: int, world_size: int, own: bool) -> None:
        self._rank, self._world_size, self._own = rank, world_size, own
        self._shown: _AllWorkers | None = None

    def present(self, info: Any) -> None:
        """Show the workers of all ranks to the dataset, and to the user's init function, in this worker."""
        if not self._own:
            self._shown = _AllWorkers(info, self._rank, self._world_size)
            torchs_worker._worker_info = self._shown  # type: ignore[assignment]

    def of(self, dataset: Any, epoch: int) -> Iterable[Any]:
        """Return what yields the part in an epoch."""
        tell = getattr(dataset, "set_epoch", None)
        if tell is not None:
            tell(epoch)
        return dataset if self._own else _Items(dataset, self._shown, self._rank, self._world_size)


class _AllWorkers:
    """Stands for a worker's own information, and counts the workers of all ranks."""

    def __init__(self, info: Any, rank: int, world_size: int) -> None:
        workers = info.num_workers if info is not None else 1
        self._info, self._looked = info, False
        self.id = rank * workers + (info.id if info is not None else 0)
        self._num_workers = world_size * workers

    @property
    def num_workers(self) -> int:
        self._looked = True
        return self._num_workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


class _Items(IterableDataset[Any]):
    """The part's items."""

    def __init__(self, dataset: Iterable[Any], shown: _AllWorkers | None, rank: int, world_size: int) -> None:
        self._dataset = dataset
        self._in_worker = shown is not None
        self._shown = shown or _AllWorkers(_Here(dataset), rank, world_size)

    def __iter__(self) -> Iterator[Any]:
        items = self._all()
        first = next(items, _NOTHING)
        if first is _NOTHING:
            return
        shown, divides = self._shown, self._shown._looked
        step, place = (1, 0) if divides else (shown._num_workers, shown.id)
        if place == 0:
            yield first
        for item in islice(items, (place or step) - 1, None, step):
            if shown._looked is not divides:
                raise LoaderError(
                    f"{type(self._dataset).__name__} asks for its worker only after its first item, when every "
                    f"{shown._num_workers}th item was taken already. Let its __iter__ ask first, or say "
                    f"shard_loader(loader, split='dataset') if it takes its rank's part itself."
                )
            yield item

    def _all(self) -> Iterator[Any]:
        if self._in_worker:
            yield from self._dataset
            return
        shown, items = self._shown, None
        while True:
            before, torchs_worker._worker_info = torchs_worker._worker_info, shown  # type: ignore[assignment]
            try:
                items = items if items is not None else iter(self._dataset)
                item = next(items, _NOTHING)
            finally:
                torchs_worker._worker_info = before
            if item is _NOTHING:
                return
            yield item


class _Here:
    """What a worker's information would be in the rank itself, where torch has none."""

    id, num_workers = 0, 1

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def seed(self) -> int:
        import torch

        return torch.initial_seed()


def split(dataset: Any, how: Split, rank: int, world_size: int) -> tuple[Any, Part, str]:
    """Say how a rank gets its part of an iterable dataset.

    Returns:
        The dataset to iterate over, how its items are taken, and that in words.

    Raises:
        LoaderError: whether the dataset takes its rank's part itself cannot be known.
    """
    by_itself, by_us = Part(rank, world_size, own=True), Part(rank, world_size, own=False)
    if how == "dataset":
        return dataset, by_itself, "the dataset takes its rank's part itself"
    if how == "items":
        return dataset, by_us, "every n-th item"
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(dataset, datasets.IterableDataset):
        if getattr(dataset, "_distributed", None) is None:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, world_size)
        return dataset, by_itself, "by datasets' split_dataset_by_node"
    webdataset = sys.modules.get("webdataset")
    if webdataset is not None and isinstance(dataset, webdataset.DataPipeline):
        return _webdataset(webdataset, dataset, rank, world_size), by_itself, "by webdataset's shards"
    if isinstance(dataset, IterDataPipe):
        return dataset, by_itself, "by the datapipe's sharding_filter"
    words = sorted(_words(type(dataset)) & _RANKS)
    if words:
        raise LoaderError(
            f"{type(dataset).__name__} is an IterableDataset whose code has the name {words[0]!r}: whether it takes "
            f"its rank's part itself cannot be known. Say shard_loader(loader, split='dataset') if it does, or "
            f"split='items' to let every rank take every n-th item."
        )
    return dataset, by_us, "every n-th item, or by the dataset's own division among workers"


def _webdataset(webdataset: Any, dataset: Any, rank: int, world_size: int) -> Any:
    """Split the list of shards where the pipeline does not, as `webdataset.split_by_node` would."""
    stages = list(dataset.pipeline)
    endless = [
        getattr(webdataset, name) for name in ("ResampledShards", "ResampledShardList") if name in dir(webdataset)
    ]
    if any(stage is webdataset.split_by_node for stage in stages) or isinstance(stages[0], tuple(endless)):
        return dataset
    mine = functools.partial(_every, rank=rank, world_size=world_size)
    result = copy.copy(dataset)
    alone = [i for i, stage in enumerate(stages) if stage is webdataset.shardlists.single_node_only]
    if alone:
        stages[alone[0]] = mine
    elif isinstance(stages[0], webdataset.SimpleShardList):
        stages.insert(1, mine)
    else:
        raise LoaderError(
            f"the webdataset pipeline begins with a {type(stages[0]).__name__}, and it cannot be seen where its shards "
            f"are shared out. Add webdataset.split_by_node after it, or say split='dataset' if it takes its part."
        )
    result.pipeline = stages
    return result


def _every(source: Iterable[Any], rank: int, world_size: int) -> Iterator[Any]:
    return islice(source, rank, None, world_size)


def _words(cls: type) -> set[str]:
    """Collect the names and strings in the code of a class and of its bases, but for torch's."""
    words: set[str] = set()
    for base in cls.__mro__:
        if base is object or base.__module__.split(".")[0] in ("torch", "typing"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                words.add(node.id)
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    return words
