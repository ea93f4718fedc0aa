"""The part of an iterable dataset that a rank takes, where there are no indices to share out.

A dataset that divides its items among a loader's workers, by `get_worker_info`, is shown the workers of all ranks as
those of one loader, and so divides them among all ranks. Of a dataset that does not, every n-th item is taken. Whether
it does is seen when it is asked for its first item. The packages that know of ranks themselves split as they do.

Until its first item all workers of all ranks have the same random numbers, so that a shuffle by a global generator is
one order everywhere. A dataset that divides has its worker's own from then on, as whatever collates has always.
"""

import ast
import copy
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import nullcontext
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from distwrap._internals.packages import is_split_by_node
from distwrap._internals.torch_data import show_worker_info, worker_info_shown
from distwrap.errors import LoaderError
from distwrap.seeding import GENERATORS, BorrowedRandomness, mix, seed_generators

Split = Literal["auto", "items", "dataset", "dispatch"]

# Words by which a dataset's code finds its rank; they do not tell whether it then takes a share.
_RANKS = {"rank", "get_rank", "local_rank", "RANK", "LOCAL_RANK", "SLURM_PROCID", "process_index"}
_RANKS |= {"world_size", "get_world_size", "WORLD_SIZE", "num_replicas", "num_processes"}
_RANKS |= {"split_by_node", "split_dataset_by_node"}

_NOTHING: Any = object()


class IterableShard(IterableDataset[Any]):
    """Items of a dataset that takes its rank's share by itself; stands in the dataset's place.

    Args:
        dataset: the user's dataset.
        collate: the user's collate function.
        epoch: the epoch that begins, int64; in shared memory where workers outlive an epoch.
        seed_of: returns the seed of an epoch's random numbers in this rank's process.

    Attributes:
        generators: names of the random number generators that are seeded for each epoch in a worker.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], epoch: torch.Tensor, seed_of: Callable[[int], int]
    ) -> None:
        self.dataset, self._collate, self._epoch, self._seed_of = dataset, collate, epoch, seed_of
        self.generators: Set[str] = GENERATORS
        self._in_worker = False
        # Behind the global generators while items are made; in a worker its own ones are there anyway.
        self._own: BorrowedRandomness | None = None
        self._alike: BorrowedRandomness | None = None

    def enter_worker(self, info: Any, seed_of: Callable[[int], int]) -> None:
        """Note the seeds of this worker's epochs."""
        self._in_worker, self._seed_of = True, seed_of

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        if self._in_worker:
            seed_generators(self._seed_of(epoch), self.generators)
        else:
            self._own = BorrowedRandomness(self._seed_of(epoch))
        getattr(self.dataset, "set_epoch", lambda _: None)(epoch)
        return self._items()

    def _items(self) -> Iterator[Any]:
        if self._own is None:
            return iter(self.dataset)
        with self._own.lent():
            items = iter(self.dataset)
        return items if hasattr(items, "state_dict") else self._drawn(items)

    def _drawn(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield items with the random numbers that they are made with, which `collate` gives back."""
        own = self._own
        try:
            while True:
                if own is not None:
                    own.take()
                if self._alike is not None:
                    self._alike.take()
                item = next(items, _NOTHING)
                if item is _NOTHING:
                    return
                yield item
        finally:
            if self._alike is not None:
                self._alike.give_back()
            if own is not None:
                own.give_back()

    def collate(self, items: Any) -> Any:
        """Collate items with random numbers of this rank's own."""
        if self._alike is not None:
            self._alike.give_back()
        with nullcontext() if self._own is None else self._own.lent():
            return self._collate(items)


class StatefulShard(IterableShard):
    """Items of a dataset that also knows its own position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's position."""
        return self.dataset.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the dataset go on from a position."""
        self.dataset.load_state_dict(state)


class SplitShard(IterableShard):
    """Every n-th item of a dataset, or what the dataset takes itself when it is shown the workers of all ranks.

    Args:
        dataset: the user's dataset.
        collate: the user's collate function.
        epoch: the epoch that begins.
        seed_of: returns the seed of an epoch's random numbers in this rank's process.
        seed: of the random numbers that all ranks and workers have alike.
        rank: this rank.
        world_size: how many ranks.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        epoch: torch.Tensor,
        seed_of: Callable[[int], int],
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(dataset, collate, epoch, seed_of)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._all_workers: _AllWorkers | None = None
        self._is_divided: bool | None = None

    def enter_worker(self, info: Any, seed_of: Callable[[int], int]) -> None:
        """Show the workers of all ranks to the dataset, and to the user's init function, in this worker."""
        super().enter_worker(info, seed_of)
        self._all_workers = _AllWorkers(info, self._rank, self._world_size)
        show_worker_info(self._all_workers)

    def _items(self) -> Iterator[Any]:
        epoch, workers = int(self._epoch), self._all_workers
        if workers is None:
            # Of the rank itself, where torch has no such information.
            info = SimpleNamespace(id=0, num_workers=1, dataset=self.dataset, seed=self._seed_of(epoch))
            workers = _AllWorkers(info, self._rank, self._world_size)
        if self._is_divided is None:
            self._is_divided = workers.was_asked  # in the init function
        workers.was_asked = self._is_divided
        self._alike = None if self._is_divided else BorrowedRandomness(mix("items", self._seed, epoch))
        items = self._drawn(_items_shown(self.dataset, workers))
        first = next(items, _NOTHING)
        if first is _NOTHING:
            return
        divides = workers.was_asked
        if divides and self._alike is not None:
            self._alike.give_back()
            self._alike = None
        step, place = (1, 0) if divides else (workers.count, workers.id)
        items = chain([first], items)
        # A round is read to its end before its item is given: the dataset's own position is then alike on all ranks.
        while around := list(islice(items, step)):
            if workers.was_asked is not divides:
                raise LoaderError(
                    f"{type(self.dataset).__name__} calls get_worker_info() only after its first item, when "
                    f"every {workers.count}th item was taken already. Let its __iter__ call it first, or say "
                    "shard_loader(loader, split='dataset') if it takes its rank's part itself."
                )
            if place < len(around):
                yield around[place]


class DataPipeShard(IterDataPipe[Any]):
    """Shard of a datapipe.

    Attributes:
        pipe: the user's, in which torch finds the pipes that it seeds and divides.
    """

    def __init__(self, shard: IterableShard) -> None:
        self._shard, self.pipe = shard, shard.dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shard)


class _AllWorkers:
    """Worker information that counts the workers of all ranks.

    Attributes:
        id: number of this worker among all.
        count: how many there are.
        was_asked: whether somebody has asked how many there are.
    """

    def __init__(self, info: Any, rank: int, world_size: int) -> None:
        self._info, self.was_asked = info, False
        self.id = rank * info.num_workers + info.id
        self.count: int = world_size * info.num_workers

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self.count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


def _items_shown(dataset: Any, workers: _AllWorkers) -> Iterator[Any]:
    """Yield a dataset's items; only while it makes them, it is shown the workers of all ranks."""
    with worker_info_shown(workers):
        items = iter(dataset)
    while True:
        with worker_info_shown(workers):
            item = next(items, _NOTHING)
        if item is _NOTHING:
            return
        yield item


def split(dataset: Any, how: Split, rank: int, world_size: int) -> tuple[Any, bool, str]:
    """Return how a rank gets its part of an iterable dataset.

    Returns:
        The dataset to iterate over, whether it takes its rank's part by itself, and the division in words.

    Raises:
        LoaderError: whether the dataset takes its rank's part itself cannot be known.
    """
    if how == "dataset":
        return dataset, True, "the dataset takes its rank's part itself"
    if how == "items":
        return dataset, False, "every n-th item"
    datasets = sys.modules.get("datasets")
    if how == "dispatch":
        if datasets is not None and isinstance(dataset, datasets.IterableDataset) and is_split_by_node(dataset):
            raise LoaderError(
                "split='dispatch' lets rank 0 read everything, but the dataset was divided by split_dataset_by_node() "
                "already: rank 0 would read its own part alone. Leave that out, or leave split at 'auto'."
            )
        return dataset, True, "rank 0 reads everything, and sends each rank its batches"
    if datasets is not None and isinstance(dataset, datasets.IterableDataset):
        if not is_split_by_node(dataset):
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, world_size)
        return dataset, True, "by datasets' split_dataset_by_node"
    webdataset = sys.modules.get("webdataset")
    if webdataset is not None and isinstance(dataset, webdataset.DataPipeline):
        return _webdataset(webdataset, dataset, rank, world_size), True, "by webdataset's shards"
    if isinstance(dataset, IterDataPipe):
        return dataset, True, "by the datapipe's sharding_filter"
    words = sorted(_words(type(dataset)) & _RANKS)
    if words:
        raise LoaderError(
            f"{type(dataset).__name__} is an IterableDataset whose code has the name {words[0]!r}: whether it takes "
            f"its rank's part itself cannot be known. Say shard_loader(loader, split='dataset') if it does, or "
            f"split='items' to let every rank take every n-th item."
        )
    return dataset, False, "every n-th item, or by the dataset's own division among workers"


def _webdataset(webdataset: Any, dataset: Any, rank: int, world_size: int) -> Any:
    """Return a pipeline that splits its list of shards, as `webdataset.split_by_node` would."""
    stages = list(dataset.pipeline)
    endless = [
        getattr(webdataset, name) for name in ("ResampledShards", "ResampledShardList") if name in dir(webdataset)
    ]
    if webdataset.split_by_node in stages or isinstance(stages[0], tuple(endless)):
        return dataset
    mine = functools.partial(_every, rank=rank, world_size=world_size)
    result = copy.copy(dataset)
    alone = webdataset.shardlists.single_node_only
    if alone in stages:
        stages[stages.index(alone)] = mine
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
    """Return the names and strings in the code of a class and of its bases, but for torch's."""
    words: set[str] = set()
    for base in cls.__mro__:
        if base is object or base.__module__.split(".")[0] in ("torch", "typing"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                    words.add(word)
    return words
