"""The class of a sharded loader: the user's own, which knows where the loop is in its data."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from distwrap.data import position as positions
from distwrap.data import workers
from distwrap.data.device_prefetch import on_device
from distwrap.data.epoch_check import EpochCheck
from distwrap.data.iterable_shards import Part
from distwrap.data.lockstep import in_step
from distwrap.data.position import Position, Shuffle
from distwrap.data.samplers import ExactBatches, MergedBatches, Order, RememberedShuffle, Share
from distwrap.data.worker_seeding import Fetching
from distwrap.environments import distwrap_environment
from distwrap.errors import LoaderError
from distwrap.group.world import World, current_world
from distwrap.seeding import preserved
from distwrap.supervision.activity import Activity


class ShardedLoader(DataLoader[Any]):
    """What a sharded loader is beside its own class.

    Attributes:
        _shard_place: rank and world size.
        _shard_device: where the batches go.
        _shard_ahead: whether they go there a step ahead.
        _shard_sampler: what takes the share; ``None`` in a single process, and where there are no indices.
        _shard_position: where the loop is.
        _shard_step: how many of the sampler's items all ranks take in a step.
        _shard_uneven: how ranks with an iterable dataset end; empty where each ends by itself.
        _shard_part: how they take their part.
        _shard_seed: of the workers.
        _shard_watch: over the ranks' loops.
        _shard_told: the epoch that workers begin, and its first step.
    """

    _shard_place: tuple[int, int]
    _shard_device: torch.device
    _shard_ahead: bool = False
    _shard_sampler: Order | Share | None = None
    _shard_position: Position
    _shard_step: int = 1
    _shard_uneven: Literal["", "shortest", "pad"] = ""
    _shard_part: Part | None = None
    _shard_seed: int = 0
    _shard_watch: EpochCheck | None = None
    _shard_told: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; left alone, each one is one more than the last."""
        self._shard_position.set_epoch(epoch)
        if self._shard_sampler is None:
            getattr(innermost(self), "set_epoch", _no_epoch)(epoch)
        getattr(super(), "set_epoch", _no_epoch)(epoch)  # the user's own class may have a use for it

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is in the data: what it was given, not what workers have fetched ahead.

        It is the same on every rank, and holds for any number of ranks and any batch size. After a whole epoch it is
        the start of the next one. An iterable dataset's position is its own, and each rank's.

        Raises:
            LoaderError: the position cannot be told; says what to write instead.
        """
        if isinstance(self.dataset, IterableDataset):
            return self._shard_iterables_state()
        if self._shard_sampler is None:
            return self._shard_in_one_process()
        told = self._shard_position.state(self._shard_consumed, self._shard_sampler.shuffle_of)
        return {**told, **self._shard_items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a position; nothing of what was gone through is fetched again.

        Raises:
            LoaderError: the state is of other data, or none.
        """
        if isinstance(self.dataset, IterableDataset):
            self._shard_load_iterables(state)
            return
        theirs = getattr(super(), "load_state_dict", None)
        if theirs is not None and self._shard_sampler is None and "consumed" not in state:
            theirs(state)
            return
        positions.check(state, **self._shard_items(), custom=isinstance(self._shard_sampler, Share))
        if self._shard_sampler is None and state["consumed"]:
            self._shard_refuse_unknown_order()
        self._shard_position.load(state)

    def __reduce__(self) -> tuple[Any, ...]:
        # Neither pickle nor copy would find this class by its name; but it follows from the user's own.
        attributes = {**self.__dict__, "_iterator": None, "_shard_told": None, "_shard_watch": None}
        return _sharded_again, (type(self).__bases__[1], attributes)

    def __iter__(self) -> Any:
        if self._shard_uneven:
            return in_step(self, self._shard_uneven)
        return self._shard_batches()

    def _shard_batches(self) -> Iterator[Any]:
        world, position = current_world(), self._shard_position
        if self._shard_place != (0, 1):
            self._shard_tell(position.next.epoch, -(-position.next.start // self._shard_step))
            if self.num_workers:
                _tidy(world)
        goes_on = self._shard_sampler is None and position.next.start > 0
        # The run that was cut off had drawn what a loader draws at its start.
        with preserved() if position.next.start > 0 else nullcontext():
            batches = self._shard_resumed() if goes_on else super().__iter__()
        world.part(Activity).follow(batches)
        if self.num_workers:
            batches = workers.explained(batches)
        if self._shard_sampler is None and not goes_on:  # else the sampler does
            position.begin(lambda epoch: Shuffle("", 0))
        if self._shard_watch is not None:
            watch = self._shard_watch
            batches = watch.first_batches(batches) if self._shard_part is not None else watch.epochs(batches)
        if self._shard_device.type != "cpu":
            batches = on_device(batches, self._shard_device, self._shard_ahead)
        return position.count(batches)

    def _shard_tell(self, epoch: int, step: int) -> None:
        begins = torch.tensor([epoch, step])
        if self._shard_told is None or not self.persistent_workers:
            self._shard_told = begins.share_memory_() if self.persistent_workers else begins  # type: ignore[no-untyped-call]
        self._shard_told.copy_(begins)

    def _get_iterator(self) -> Any:
        if self._shard_place == (0, 1):
            return super()._get_iterator()
        rank, world_size = self._shard_place
        then = self.worker_init_fn
        fetching = Fetching(self._shard_seed, rank, world_size, self._shard_part, self._shard_told, then)
        if not self.num_workers:
            with fetching.here():
                return super()._get_iterator()
        self.worker_init_fn = fetching
        try:
            return super()._get_iterator()
        finally:
            self.worker_init_fn = then

    # Positions

    def _shard_items(self) -> dict[str, Any]:
        batches: Any = self.batch_sampler
        if isinstance(self._shard_sampler, Order):
            return {"unit": "samples", "items": self._shard_sampler.items}
        if self._shard_sampler is None:
            return {"unit": "samples", "items": len(innermost(self))}  # type: ignore[arg-type]
        whole = self._shard_sampler is batches or isinstance(batches, MergedBatches)
        return {"unit": "batches" if whole else "samples", "items": self._shard_sampler.items}

    def _shard_consumed(self, start: int, taken: int) -> int:
        items = self._shard_items()["items"]
        batches = self.batch_sampler
        if isinstance(batches, (ExactBatches, MergedBatches)) and taken >= batches.count(start):
            return int(items)
        at = start + taken * self._shard_step
        return at if items is None else min(at, items)

    # In a single process the loader keeps its own order, until it goes on from a position.

    def _shard_in_one_process(self) -> dict[str, Any]:
        sampler = innermost(self)
        theirs = getattr(super(), "state_dict", None)
        if theirs is not None:  # a StatefulDataLoader's
            return theirs()  # type: ignore[no-any-return]
        if self._shard_position.now is not None:
            self._shard_refuse_unknown_order()
        usual = getattr(sampler, "drawn", None) or Shuffle("", 0)
        told = self._shard_position.state(self._shard_consumed, lambda epoch: usual)
        if not told["order"]:
            told.update(order=usual.order, seed=usual.seed)
        return {**told, **self._shard_items()}

    def _shard_refuse_unknown_order(self) -> None:
        sampler = innermost(self)
        plain = self.batch_sampler is None or type(self.batch_sampler) is BatchSampler
        if not plain or not isinstance(sampler, (SequentialSampler, RememberedShuffle)):
            raise LoaderError(
                f"in a single process the order is this loader's own, drawn by its {type(sampler).__name__}, and "
                f"cannot be drawn again from a position in it. Say shard_loader(loader, seed=0): its order then "
                f"follows from the seed, as it does with several ranks."
            )

    def _shard_resumed(self) -> Iterator[Any]:
        """Go through the rest of an epoch, in the order that the position holds."""
        batches: Any = self.batch_sampler
        rest = copy.copy(self)
        rest.__class__ = type(self).__bases__[1]
        order = Order(range(self._shard_items()["items"]), 0, 1, "pad", 0, "")
        order.position = self._shard_position
        changed: dict[str, Any] = {"sampler": order, "_iterator": None}
        if batches is not None:
            changed["batch_sampler"] = type(batches)(order, batches.batch_size, batches.drop_last)
        rest.__dict__.update(changed)
        return iter(rest)

    # An iterable dataset's position is its own.

    def _shard_iterables_state(self) -> dict[str, Any]:
        rank, world_size = self._shard_place
        whose = {"rank": rank, "world_size": world_size, "epoch": self._shard_position.epoch}
        theirs = getattr(super(), "state_dict", None)
        if theirs is not None:
            return {**whose, "loader": theirs()}
        if self.num_workers == 0 and hasattr(self.dataset, "state_dict"):
            return {**whose, "dataset": self.dataset.state_dict()}
        raise LoaderError(
            f"the position in {type(self.dataset).__name__} cannot be told: an iterable dataset has no indices, and "
            f"{'its workers fetch ahead of the loop' if self.num_workers else 'it has no state_dict()'}. "
            f"Use torchdata's StatefulDataLoader in DataLoader's place, or a dataset with state_dict() and "
            f"num_workers=0, or a dataset with indices."
        )

    def _shard_load_iterables(self, state: dict[str, Any]) -> None:
        rank, world_size = self._shard_place
        if not isinstance(state, dict) or not {"rank", "world_size", "epoch"} <= state.keys():
            raise LoaderError("this is no position of a sharded loader over an iterable dataset.")
        if (state["rank"], state["world_size"]) != (rank, world_size):
            raise LoaderError(
                f"the position is rank {state['rank']}'s of {state['world_size']}, but this is rank {rank} of "
                f"{world_size}: in an iterable dataset each rank has a position of its own. Save one for each rank "
                f"(distwrap.gather_object), and go on with as many ranks."
            )
        if "loader" in state:
            super().load_state_dict(state["loader"])  # type: ignore[misc]
        else:
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        self._shard_position.next = positions.Begun(state["epoch"])


def innermost(loader: DataLoader[Any]) -> object:
    """Return the sampler that decides the order."""
    batches: Any = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)


def is_torchs(thing: object, cls: type) -> bool:
    """Say whether something is of a class of torch's, or of torchdata's of the same name, and no further subclass."""
    kind = type(thing)
    return kind is cls or (kind.__name__ == cls.__name__ and kind.__module__.startswith("torchdata."))


def changed(loader: Any, attributes: dict[str, Any]) -> Any:
    """Return a copy of a loader, of the same class and sharded, with other attributes."""
    result = copy.copy(loader)
    result.__dict__.update(attributes, _iterator=None)
    result.__class__ = sharded_class(type(loader))
    return result


def remembering(loader: Any, device: torch.device) -> Any:
    """Let the loader of a single process know where its loop is: it stays the same object, with the same batches."""
    sampler: Any = innermost(loader)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        sampler.__class__ = RememberedShuffle
    batches: Any = loader.batch_sampler
    step = getattr(batches, "batch_size", None) or 1
    loader.__dict__.update(_shard_place=(0, 1), _shard_device=device, _shard_position=Position(), _shard_step=step)
    loader.__class__ = sharded_class(type(loader))
    return loader


def _tidy(world: World) -> None:
    undo = workers.tidy(os.environ.get(distwrap_environment.STORE, ""))
    if undo is not None:
        world.cleanup.callback(undo)


def _no_epoch(epoch: int) -> None:
    """Whoever shuffles by torch's generator has no use for the number."""


def _sharded_again(cls: type[DataLoader[Any]], attributes: dict[str, Any]) -> ShardedLoader:
    loader: ShardedLoader = object.__new__(sharded_class(cls))
    loader.__dict__.update(attributes)
    return loader


_classes: dict[type, type] = {}


def sharded_class(cls: type[DataLoader[Any]]) -> type:
    """Return the class of loaders of a class that are sharded."""
    if issubclass(cls, ShardedLoader):
        return cls
    if cls not in _classes:
        _classes[cls] = type(f"Sharded{cls.__name__}", (ShardedLoader, cls), {"__module__": cls.__module__})
    return _classes[cls]


def batches_left(loader: Any) -> int | None:
    """Return how many batches the next iteration over a loader gives on this rank; ``None`` where nobody knows."""
    try:
        whole = len(loader)
    except TypeError:
        return None
    if not isinstance(loader, ShardedLoader):
        return whole
    start, batches = loader._shard_position.next.start, loader.batch_sampler
    if isinstance(batches, (ExactBatches, MergedBatches)):
        return batches.count(start)
    return whole - start // loader._shard_step
