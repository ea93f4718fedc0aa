"""`shard_loader`: the user's own loader, with this rank's share of its indices.

The loader is copied, not built again: a subclass keeps its attributes, and no constructor is guessed. In the copy the
sampler and batch sampler are exchanged for ones that take a share of the same order.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from distwrap.data import workers
from distwrap.data.samplers import ExactBatches, MergedBatches, Order, Share
from distwrap.data.streams import Mode
from distwrap.errors import LoaderError, OptionError, unknown_name
from distwrap.group.world import World, current_world
from distwrap.model.wrapped import to_device
from distwrap.placement import own
from distwrap.seeding import mix

Loader = TypeVar("Loader", bound="DataLoader[Any]")
Modes = Literal["auto", "pad", "exact", "drop"]
BatchSize = Literal["per_rank", "global"]
Orders = Literal["auto", "torch", "stream"]

TORCHS_MOST = 10**7  # samples, up to which order="auto" shuffles as torch does


class ShardedLoader(DataLoader[Any]):
    """What a sharded loader is beside its own class."""

    _shard_sampler: Any = None
    _shard_device: torch.device
    _shard_place: tuple[int, int]  # rank and world size

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; left alone, each one is one more than the last."""
        sampler = self._shard_sampler if self._shard_sampler is not None else _innermost(self)
        getattr(sampler, "set_epoch", _no_epoch)(epoch)
        getattr(super(), "set_epoch", _no_epoch)(epoch)  # the user's own class may have a use for it

    def __reduce__(self) -> tuple[Any, ...]:
        # Neither pickle nor copy would find this class by its name; but it follows from the user's own.
        return _sharded_again, (type(self).__bases__[1], {**self.__dict__, "_iterator": None})

    def __iter__(self) -> Any:
        if self.num_workers:
            _tidy(current_world())
        batches = super().__iter__()
        current_world().crumbs.follow(batches)
        if self._shard_device.type == "cpu":
            return batches
        return _on_device(batches, self._shard_device)


def next_epoch(loader: DataLoader[Any]) -> int:
    """Say which epoch of a sharded loader comes next; 0 for any other loader."""
    epochs = getattr(getattr(loader, "_shard_sampler", None), "epochs", None)
    return 0 if epochs is None else int(epochs.next)


def shard_loader(
    loader: Loader,
    *,
    mode: Modes = "auto",
    batch_size: BatchSize = "per_rank",
    order: Orders = "auto",
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> Loader:
    """Return the same loader for this rank's share of the data; in a single process on the CPU, the loader itself.

    The share is taken of the loader's own order: shuffled as by ``DistributedSampler``, or whatever its sampler or
    batch sampler yields. A loader that has a ``DistributedSampler`` already is left alone.

    Args:
        loader: a ``DataLoader``, or a subclass, over a map-style dataset.
        mode: ``"pad"`` (all ranks take equally many samples, a few of them twice), ``"exact"`` (each sample once; with
            at least one sample a rank all ranks still take equally many batches, a left-over sample joining the last),
            ``"drop"`` (the samples that do not go round are left out), or ``"auto"``: pad when the loader shuffles,
            exact when it does not. The loader's own ``drop_last`` holds in every mode.
        batch_size: ``"per_rank"`` leaves the loader's batch size as it is, so the global batch grows with the ranks;
            ``"global"`` divides it by the number of ranks.
        order: how a loader with ``shuffle=True`` shuffles: ``"torch"`` as ``DistributedSampler`` to the bit, in time
            and memory that grow with the dataset; ``"stream"`` by a computed permutation, which costs the same at any
            size; ``"auto"`` is torch's up to 10 million samples.
        seed: of the shuffle; by default the run's, else 0.
        device: where the batches go; by default this rank's device. ``"cpu"`` leaves them where they are.

    Returns:
        A loader of the same class. Its epochs advance by themselves; ``set_epoch(n)`` says which one comes next.

    Raises:
        LoaderError: the loader cannot be sharded safely; says what to write instead.

    Example:
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> shard_loader(loader) is loader  # one process
        True
    """
    if not isinstance(loader, DataLoader):
        raise LoaderError(f"shard_loader() takes a DataLoader, not a {type(loader).__qualname__}.")
    if mode not in get_args(Modes):
        raise OptionError(unknown_name("mode", mode, get_args(Modes)))
    if batch_size not in get_args(BatchSize):
        raise OptionError(unknown_name("batch_size", batch_size, get_args(BatchSize)))
    if order not in get_args(Orders):
        raise OptionError(unknown_name("order", order, get_args(Orders)))
    world = current_world()
    world.crumbs.drop("shard_loader")
    where = torch.device(device) if device is not None else world.device
    place = world.placement
    here = (place.rank, place.world_size)
    if isinstance(loader, ShardedLoader) and loader._shard_place != (0, 1):
        if loader._shard_place != here:
            rank, world_size = loader._shard_place
            raise LoaderError(
                f"the loader was sharded for rank {rank} of {world_size}, but this is rank {place.rank} of "
                f"{place.world_size}. Hand shard_loader() the plain loader."
            )
        return loader
    given = _distributed_sampler(loader)
    if given is not None and (given.rank, given.num_replicas) != here:
        raise LoaderError(
            f"the loader's {type(given).__name__} is for rank {given.rank} of {given.num_replicas}, but this is rank "
            f"{place.rank} of {place.world_size}. Hand shard_loader() a plain loader, or make the sampler after "
            f"setup_process_group()."
        )
    if place.world_size == 1 or given is not None:
        return _same_order(loader, where, here)
    if isinstance(loader.dataset, IterableDataset):
        raise LoaderError(
            f"{type(loader.dataset).__name__} is an IterableDataset, which has no indices to share out. Yield every "
            f"n-th item in its __iter__: `islice(items, distwrap.rank(), None, distwrap.world_size())`, and count the "
            f"loader's workers in with torch.utils.data.get_worker_info()."
        )
    return _sharded(loader, world, mode, batch_size, order, seed, where)


def _same_order(loader: Loader, where: torch.device, place: tuple[int, int]) -> Loader:
    if isinstance(loader, ShardedLoader) and loader._shard_device == where:
        return loader
    if where.type != "cpu":
        return _changed(loader, {}, where, place)
    if not hasattr(loader, "set_epoch"):
        tell = getattr(_innermost(loader), "set_epoch", _no_epoch)
        loader.set_epoch = tell
    return loader


def _changed(loader: Loader, changed: dict[str, Any], where: torch.device, place: tuple[int, int]) -> Loader:
    result = copy.copy(loader)
    result.__dict__.pop("set_epoch", None)  # from `_same_order`, where the loader went through a single process before
    result.__dict__.update(changed, _iterator=None, _shard_device=where, _shard_place=place)
    result.__class__ = _sharded_class(type(loader))
    return result


def _sharded(
    loader: Loader,
    world: World,
    mode: Modes,
    batch_size: BatchSize,
    order: Orders,
    seed: int | None,
    where: torch.device,
) -> Loader:
    place = world.placement
    shuffles = not isinstance(_innermost(loader), SequentialSampler)
    chosen: Mode = ("pad" if shuffles else "exact") if mode == "auto" else mode
    order_seed = seed if seed is not None else world.seed if world.seed is not None else 0
    shard = (place.rank, place.world_size, chosen)
    batches: Any = loader.batch_sampler
    changed: dict[str, Any] = {}
    sampler: Order | Share
    if type(batches) is BatchSampler:
        size = _per_rank(batches.batch_size, place.world_size, batch_size)
        sampler = _share_of(batches.sampler, loader.dataset, shard, order_seed, order)
        changed["sampler"], changed["batch_size"] = sampler, size
        if chosen == "exact":
            changed["batch_sampler"] = ExactBatches(sampler, _length(batches.sampler), size, batches.drop_last)
        else:
            changed["batch_sampler"] = BatchSampler(sampler, size, batches.drop_last)
    else:
        items: Any
        items, kind = (loader.sampler, "sampler") if batches is None else (batches, "batch_sampler")
        if batch_size == "global":
            raise LoaderError(
                f"batch_size='global' divides the loader's batch size, but its {kind} is a {type(items).__name__}, "
                f"which makes its own. Make its batches smaller, and use batch_size='per_rank'."
            )
        if batches is not None:
            sampler = whole = Share(items, *shard, order_seed)
            changed[kind] = MergedBatches(whole, _length(items)) if chosen == "exact" else whole
        else:
            changed[kind] = sampler = _share_of(items, loader.dataset, shard, order_seed, order)
        if batches is None and chosen == "exact" and _length(items) % place.world_size:
            # Items of this loader are whole batches, or single samples: what they hold cannot be merged.
            raise LoaderError(
                f"the loader fetches item by item (batch_size=None), so {_length(items)} items over {place.world_size} "
                f"ranks cannot be taken in equally many steps with each once. Say mode='pad' or mode='drop'."
            )
    changed["generator"] = _worker_generator(loader, world)
    changed["_shard_sampler"] = sampler
    return _changed(loader, changed, where, (place.rank, place.world_size))


def _share_of(sampler: Any, dataset: Any, shard: tuple[int, int, Mode], seed: int, order: Orders) -> Order | Share:
    # The sampler may run over something else than the dataset, as a part of it.
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if plain and hasattr(dataset, "__len__") and len(sampler) == len(sampler.data_source) == len(dataset):
        if type(sampler) is SequentialSampler:
            return Order(dataset, *shard, seed, "")
        if order == "auto":
            order = "torch" if len(dataset) <= TORCHS_MOST else "stream"
        return Order(dataset, *shard, seed, order)
    if order != "auto":
        raise LoaderError(
            f"order={order!r} says how a loader with shuffle=True shuffles, but the order of this one is its "
            f"{type(sampler).__name__}'s. Leave order at 'auto'."
        )
    return Share(sampler, *shard, seed)


def _per_rank(size: int, world_size: int, meaning: BatchSize) -> int:
    if meaning == "per_rank":
        return size
    if size % world_size:
        above = size + world_size - size % world_size
        below = above - world_size
        raise LoaderError(
            f"batch_size='global': the loader's batch size {size} does not divide by {world_size} ranks. "
            f"Make it {f'{below} or ' if below else ''}{above}."
        )
    return size // world_size


def _worker_generator(loader: DataLoader[Any], world: World) -> torch.Generator:
    """Seed the loader's workers, and so the augmentation, apart on each rank: torch seeds them from this generator."""
    world.loaders += 1
    base = loader.generator.initial_seed() if loader.generator is not None else torch.initial_seed()
    generator = torch.Generator()
    generator.manual_seed(
        mix("workers", world.seed if world.seed is not None else base, world.loaders, world.placement.rank)
    )
    return generator


def _innermost(loader: DataLoader[Any]) -> object:
    batches: Any = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)


def _distributed_sampler(loader: DataLoader[Any]) -> Any:
    """Find the sampler that takes a share already: torch's, or another that has the same two attributes."""
    samplers: tuple[Any, ...] = (loader.sampler, loader.batch_sampler, _innermost(loader))
    return next((s for s in samplers if hasattr(s, "num_replicas") and hasattr(s, "rank")), None)


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise LoaderError(
            f"mode='exact' needs to know how many items {type(sampler).__name__} yields, but it has no len(). "
            f"Give it a __len__, or say mode='pad' or mode='drop'."
        ) from None


def _tidy(world: World) -> None:
    undo = workers.tidy(os.environ.get(own.STORE, ""))
    if undo is not None:
        world.cleanup.callback(undo)


def _on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield to_device(batch, device)


def _no_epoch(epoch: int) -> None:
    """In a single process the loader shuffles by torch's generator, which no epoch number changes."""


def _sharded_again(cls: type[DataLoader[Any]], attributes: dict[str, Any]) -> ShardedLoader:
    loader: ShardedLoader = object.__new__(_sharded_class(cls))
    loader.__dict__.update(attributes)
    return loader


_classes: dict[type, type] = {}


def _sharded_class(cls: type[DataLoader[Any]]) -> type:
    if issubclass(cls, ShardedLoader):  # a single process has moved its batches to a device
        return cls
    if cls not in _classes:
        _classes[cls] = type(f"Sharded{cls.__name__}", (ShardedLoader, cls), {"__module__": cls.__module__})
    return _classes[cls]
