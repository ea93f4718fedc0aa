"""The sharded loader: it stands before a copy of the user's own, and knows the position of the loop in its data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, SequentialSampler

from distwrap._internals.torch_data import ITERATOR
from distwrap.checks import whole
from distwrap.data import workers
from distwrap.data.fetching import SeededFetch, SeededIndices, WorkerInit, worker_seed
from distwrap.data.indices import share_size, stream_batches
from distwrap.data.iterable_shards import DataPipeShard, IterableShard, SplitShard, StatefulShard
from distwrap.data.lockstep import Lockstep, in_step
from distwrap.data.position import (
    READER,
    EpochStart,
    Position,
    Shuffle,
    check_state,
    check_stream_state,
    is_ahead,
    move,
)
from distwrap.data.samplers import After, ExactBatches, Order, RememberedShuffle, Share
from distwrap.devices.transfer import on_device, to_device
from distwrap.errors import LoaderError
from distwrap.group.world import active_world, current_world
from distwrap.model.checks.unwrapped import Unwrapped
from distwrap.seeding import preserved
from distwrap.supervision.activity import Activity

if TYPE_CHECKING:
    from distwrap.data.dispatch import Dispatch
    from distwrap.data.epoch_check import EpochCheck

T_co = TypeVar("T_co", covariant=True)
Item = TypeVar("Item")
Loader = TypeVar("Loader", bound="DataLoader[Any]")


@dataclass
class Sharding:
    """Decisions about a sharded loader, and the loop's position in it.

    Attributes:
        device: where the batches go.
        rank: the rank whose share this is.
        world_size: how many ranks there are.
        copy_ahead: whether batches go to the device a step ahead.
        position: where the loop is.
        sampler: takes the share; ``None`` in a single process, and where there are no indices.
        unit: of the sampler's items, ``"samples"`` or ``"batches"``.
        items_per_step: how many of them all ranks take in a step.
        uneven: how ranks with an iterable dataset end; empty where each ends by itself.
        lockstep: the loop in step with the other ranks, where they may end unevenly.
        dispatch: how one rank reads an iterable dataset for all, if it does.
        by_itself: whether an iterable dataset takes its rank's part by itself.
        compares: whether the items of one that does not must be alike on all ranks.
        seed: of the random numbers with which samples are fetched.
        order_seed: of those with which an iterable dataset makes the items that are divided, alike on all ranks.
        endless: whether the user's class goes on over one iterator for ever, and this one has epochs in its place.
        epoch_check: of the ranks' loops.
        told: two numbers in memory that the workers share: the epoch that begins, and a digest of the first items that
            they divide.
        same: whether all ranks get all of the data on purpose.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    copy_ahead: bool = False
    position: Position = field(default_factory=Position)
    sampler: Order | Share | None = None
    unit: str = "samples"
    items_per_step: int = 1
    uneven: Literal["", "shortest", "pad"] = ""
    lockstep: Lockstep[Any] | None = None
    dispatch: Dispatch | None = None
    by_itself: bool = False
    compares: bool = False
    seed: int = 0
    order_seed: int = 0
    endless: bool = False
    epoch_check: EpochCheck | None = None
    told: torch.Tensor | None = None
    same: bool = False


class Batches(Iterator[Any]):
    """One pass over a rank's batches, each of which is counted, shown to observers, and moved to the device.

    Where a sample cannot be loaded the error is raised, and the next call goes on after its batch, as torch's does.

    Args:
        stream: what is fetched.
        position: of the loop.
        skipped: how many batches of the epoch come before these.
        observers: called with the number of each batch and the batch, before the loop has it.
        moved: moves a batch to the device.
        before: called before a batch is fetched.
        explained: raises an error with advice in the place of one of the workers'.

    Attributes:
        step: how many batches were fetched.
    """

    def __init__(
        self,
        stream: Iterator[Any],
        position: Position,
        skipped: int,
        observers: list[Callable[[int, Any], object]],
        moved: Callable[[Any], Any] | None,
        before: Callable[[], None] | None,
        explained: Callable[[Exception], None],
    ) -> None:
        self._stream, self._position, self._skipped, self._observers = stream, position, skipped, observers
        self._moved, self._before, self._explained = moved, before, explained
        self.step = 0
        self._begun: EpochStart | None = None

    def __next__(self) -> Any:
        if self._before is not None:
            self._before()
        try:
            batch = next(self._stream)
        except StopIteration:
            self._observers = []
            self._count(None)
            raise
        except Exception as error:
            self._count(self.step + 1)
            self._explained(error)
            raise
        self._count(self.step + 1)
        for observe in self._observers:
            observe(self.step, batch)
        return batch if self._moved is None else self._moved(batch)

    def _count(self, step: int | None) -> None:
        """Count a batch, or the end; workers are ahead of the loop, and its position moves once it has the batch."""
        self._begun, self.step = self._begun or self._position.now, self.step if step is None else step
        move(partial(self._position.reach, self._begun, None if step is None else self._skipped + step))


class ShardedLoader(DataLoader[T_co]):
    """Loader that `shard_loader` returns: an instance of the user's class too, with this rank's share and a position.

    It hands all else on to a copy of the user's loader, in which what fetches this rank's samples stands in the place
    of the user's dataset and samplers.
    """

    _loader: DataLoader[Any]
    _sharding: Sharding

    def __init__(self, loader: DataLoader[Any], sharding: Sharding) -> None:
        self.__dict__.update(_loader=loader, _sharding=sharding)
        if sharding.world_size > 1:  # of which the user sees their own
            shown = ("dataset", "collate_fn", "worker_init_fn", "sampler", "batch_sampler")
            self.__dict__.update({name: getattr(loader, name) for name in shown})
            self._put_fetching()

    @property  # type: ignore[misc]  # as isinstance() sees it
    def __class__(self) -> type:
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_sharding"):  # of one that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("collate_fn", "worker_init_fn") and name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._loader, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = copied(self._loader, {name: self.__dict__[name] for name in self.__dict__ if name[0] != "_"})
        return ShardedLoader, (plain, replace(self._sharding, told=None, epoch_check=None, lockstep=None))

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch; without a call, each epoch is one more than the last."""
        self._sharding.position.set_epoch(epoch)
        # The user's own class may have a use for it too.
        given = () if self._sharding.sampler is not None else (batches_of(self)[1], innermost(self))
        for owner in (self._loader, *given):
            getattr(owner, "set_epoch", lambda _: None)(epoch)

    def __iter__(self) -> Any:
        sharding = self._sharding
        timed = current_world().part(Activity).timed
        if not sharding.uneven:
            return timed(self.rank_batches())
        sharding.lockstep = in_step(self, sharding.uneven, sharding.epoch_check.site if sharding.epoch_check else "")
        return timed(iter(sharding.lockstep))

    def __len__(self) -> int:
        sharding = self._sharding
        length = DataLoader.__len__(self._loader) if sharding.endless else len(self._loader)
        if sharding.dispatch is not None:
            return sharding.dispatch.length(length, sharding.rank, sharding.world_size)
        if not self._is_iterable or sharding.world_size == 1 or sharding.by_itself:
            return length
        rank = {"": sharding.rank, "pad": 0, "shortest": sharding.world_size - 1}[sharding.uneven]
        place = (rank, sharding.world_size, max(1, self.num_workers))
        return stream_batches(len(self.dataset), *place, self.batch_size or 1, self.drop_last)  # type: ignore[arg-type]

    def rank_batches(self, *, again: bool = False) -> Iterator[Any]:
        """Return an iterator over this rank's batches, which waits for no other rank.

        Args:
            again: whether it goes through the same epoch once more, where a rank is out of batches before the others.
        """
        sharding, world = self._sharding, current_world()
        position, device = sharding.position, sharding.device
        if again:
            position.next = EpochStart(position.next.epoch - 1)
        begun, helped = position.next, bool(self.num_workers and self._reads)
        if sharding.world_size > 1:
            if helped and active_world() is not None:  # else nobody would remove it
                world.part(workers.WorkerFolder)
            self._put_fetching()
        stream = sharding.dispatch.batches(self._begin) if sharding.dispatch is not None else self._begin()
        position.own_state = None
        if sharding.sampler is None and not begun.start:  # else the sampler does
            position.begin(lambda epoch: Shuffle("", 0))
        if begun.skip and not self._skips_indices:
            stream = islice(stream, begun.skip, None)
        observers: list[Callable[[int, Any], object]] = []
        if sharding.epoch_check is not None:
            observers.append(sharding.epoch_check.begin(self._is_iterable, sharding.told))
        if sharding.world_size > 1 and world.tells_others:
            observers += world.part(Unwrapped).observers()
        pinned = self.pin_memory and self._reads and sharding.dispatch is None
        moved = partial(to_device, device=device, waits=not pinned) if device.type != "cpu" else None
        if moved and sharding.copy_ahead:
            stream, moved = on_device(stream, device, True, pinned), None
        remember = self._remember if sharding.sampler is None else None
        explained = workers.explain if helped else lambda error: None
        batches = Batches(stream, position, begun.skip, observers, moved, remember, explained)
        world.part(Activity).follow(batches)
        return batches

    def _begin(self) -> Iterator[Any]:
        """Return torch's iterator."""
        sharding, loader = self._sharding, self._loader
        begun = sharding.position.next
        if sharding.sampler is None and begun.start:
            order = Order(range(self._items()["items"]), 0, 1, "pad", 0, "")
            order.position = sharding.position
            loader = _with_order(loader, order)
        elif begun.skip and self._skips_indices:
            name, items = batches_of(loader)
            loader = copied(loader, {name: After(items, begun.skip)})
        # The run that was cut off had drawn what a loader draws at its start.
        with preserved() if begun.start > 0 else nullcontext():
            return DataLoader.__iter__(loader) if sharding.endless else iter(loader)

    def _put_fetching(self) -> None:
        """Put what fetches this rank's samples in the place of the user's dataset and samplers."""
        sharding = self._sharding
        seed, place = sharding.seed, (sharding.rank, sharding.world_size)
        if sharding.told is None or not self.persistent_workers:
            sharding.told = torch.zeros(2, dtype=torch.int64, device="cpu")
            if self.num_workers:
                sharding.told.share_memory_()  # type: ignore[no-untyped-call]
        epoch = sharding.position.next.epoch
        sharding.told.copy_(torch.tensor([epoch, 0], device="cpu"))
        source: IterableShard | SeededFetch
        if self._is_iterable:
            seed_of = partial(worker_seed, seed, rank=sharding.rank, worker=0, workers=1)
            what = (self.dataset, self.collate_fn, sharding.told, seed_of)
            if sharding.by_itself:
                source = (StatefulShard if hasattr(self.dataset, "state_dict") else IterableShard)(*what)
            else:
                source = SplitShard(*what, sharding.order_seed, *place, sharding.compares)
            shown = DataPipeShard(source) if isinstance(self.dataset, IterDataPipe) else source
            fetching: dict[str, Any] = {"dataset": shown, "collate_fn": source.collate}
        else:
            name, items = batches_of(self)
            source = SeededFetch(self.dataset, self.collate_fn, name == "batch_sampler")
            told = sharding.told if sharding.sampler is None else None
            indices = SeededIndices(items, sharding.position, told, sharding.items_per_step, seed, *place)
            fetching = {"dataset": source, "collate_fn": source, name: indices}
        if self.num_workers:
            fetching["worker_init_fn"] = WorkerInit(source, seed, epoch, sharding.rank, self.worker_init_fn)
        self._loader.__dict__.update(fetching)

    @property
    def _is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _reads(self) -> bool:
        """Whether this rank reads the data, instead of getting it from the rank that does."""
        return self._sharding.dispatch is None or self._sharding.dispatch.reads

    # Positions

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position: after the batches that it was given, not those that workers have fetched ahead.

        It is the same on every rank, and holds for any number of ranks and any batch size. After a whole epoch it is
        the start of the next one. The position in an iterable dataset is the dataset's own, and differs between ranks.

        Raises:
            LoaderError: the position is unknown; the message says what to write instead.
        """
        sharding = self._sharding
        sampler, position = sharding.sampler, sharding.position
        if self._is_iterable:
            place = (sharding.rank, sharding.world_size) if sharding.dispatch is None else (READER, 1)
            own = self._own_state()
            if own is not None or not self._reads:
                return {"rank": place[0], "world_size": place[1], "epoch": position.epoch, **(own or {})}
            raise LoaderError(
                f"the position in {type(self.dataset).__name__} is unknown: an iterable dataset has no indices, "
                f"and {'its workers fetch ahead of the loop' if self.num_workers else 'it has no state_dict()'}. "
                "Use torchdata's StatefulDataLoader in DataLoader's place, or a dataset with state_dict() and "
                "num_workers=0, or a dataset with indices."
            )
        if self.num_workers and not getattr(self, "in_order", True) and position.now and position.batches_taken:
            raise LoaderError(
                f"the loop has had {position.batches_taken} batches, and it is unknown which ones: with "
                "in_order=False they come in the order in which the workers finish. Say DataLoader(..., "
                "in_order=True), or save between epochs."
            )
        if sampler is not None:
            return {**position.state(self._consumed, sampler.shuffle_of), **self._items()}
        own = self._own_state()
        if own is not None:  # a StatefulDataLoader's
            return own["loader"]  # type: ignore[no-any-return]
        if position.now is not None:
            self._check_order_is_known()
        usual = getattr(innermost(self), "drawn", None) or Shuffle("", 0)
        state = position.state(self._consumed, lambda epoch: usual)
        if not state["order"]:
            state.update(order=usual.order, seed=usual.seed)
        return {**state, **self._items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue from a saved position; samples before it are not fetched again.

        Args:
            state: what `state_dict` has returned.

        Raises:
            LoaderError: the state is not a position, or is a position in other data.
        """
        sharding, theirs = self._sharding, getattr(self._loader, "load_state_dict", None)
        sharding.position.own_state = None
        if self._is_iterable:
            place = (sharding.rank, sharding.world_size) if sharding.dispatch is None else (READER, 1)
            check_stream_state(state, *place)
            if "loader" in state and self._reads:
                cast("Any", theirs)(state["loader"])
            elif self._reads:
                self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
            sharding.position.next = EpochStart(state["epoch"])
            return
        sampler = sharding.sampler
        if theirs is not None and sampler is None and "consumed" not in state:
            theirs(state)
            return
        check_state(state, **self._items(), custom=isinstance(sampler, Share))
        if sampler is None and state["consumed"]:
            self._check_order_is_known()
        sharding.position.load(state)

    def skip(self: Loader, batches: int) -> Loader:
        """Let the next iteration leave out its first batches on every rank, for those who have saved only a step.

        The epoch is the next one, or that of `set_epoch`, called before or after. Where the order follows from a seed
        nothing of what is left out is fetched. A single process fetches nothing either: its order is drawn as ever, so
        seed it as it was. An iterable dataset, and a loader that keeps its workers for all epochs in a single process,
        is read up to there.

        Args:
            batches: how many of this loader's batches, on each rank; also 0.

        Returns:
            The loader itself.

        Raises:
            OptionError: it is no whole number from 0.
            LoaderError: an epoch has fewer batches.

        Example:
            >>> from distwrap import shard_loader
            >>> loader = shard_loader(DataLoader(range(6), batch_size=2))
            >>> list(loader.skip(2))
            [tensor([4, 5])]
        """
        batches, this = whole(0)("batches", batches), cast("ShardedLoader[Any]", self)
        position, rank = this._sharding.position, this._sharding.rank
        begun = position.next
        with suppress(TypeError):  # of some datasets nobody knows
            if batches > (left := this.batches_to_come()):
                raise LoaderError(f"skip({batches}): the next epoch of this loader has {left} batches on rank {rank}.")
        if this._sharding.sampler is None and not begun.start:
            position.next = replace(begun, skip=begun.skip + batches)
        else:
            position.next = replace(begun, start=this._consumed(begun.start, batches))
        if begun is position.skipped or not begun.start + begun.skip:
            position.skipped = position.next
        position.now = None
        return self

    def batches_to_come(self) -> int:
        """Return how many batches the next iteration gives on this rank.

        Raises:
            TypeError: nobody knows.
        """
        sharding, batches = self._sharding, batches_of(self)[1]
        begun, sampler = sharding.position.next, sharding.sampler
        if not begun.start:
            return max(0, len(self) - begun.skip)
        items = self._items()["items"]
        if items is None:
            raise TypeError(f"{type(sampler).__name__} has no length")
        left = max(0, items - begun.start)
        if isinstance(batches, ExactBatches):
            return batches.count(begun.start) if left else 0
        count = share_size(left, sharding.rank, sharding.world_size, "pad" if sampler is None else sampler.mode)
        if batches is sampler or not isinstance(batches, BatchSampler):
            return count
        return count // batches.batch_size if batches.drop_last else -(-count // batches.batch_size)

    def _items(self) -> dict[str, Any]:
        """Return the unit in which the position counts, and how many of them there are."""
        sampler = self._sharding.sampler
        items = len(innermost(self)) if sampler is None else sampler.items  # type: ignore[arg-type]
        return {"unit": self._sharding.unit, "items": items}

    def _consumed(self, start: int, taken: int) -> int:
        items, batches = self._items()["items"], batches_of(self)[1]
        if isinstance(batches, ExactBatches) and taken >= batches.count(start):
            return int(items)
        at = start + taken * self._sharding.items_per_step
        return at if items is None else min(at, items)

    # In a single process the loader keeps its own order, until it goes on from a position.

    @property
    def _skips_indices(self) -> bool:
        """Whether batches that are left out are not even fetched."""
        is_torchs = not hasattr(self._loader, "state_dict") and not self.persistent_workers
        return is_torchs and self._sharding.world_size == 1 and not self._is_iterable

    def _check_order_is_known(self) -> None:
        sampler = innermost(self)
        if not _is_plain(self) or type(sampler) not in (SequentialSampler, RememberedShuffle):
            raise LoaderError(
                f"in a single process the order is drawn by this loader's {type(sampler).__name__}, and cannot "
                "be drawn again from a position. Say shard_loader(loader, seed=0): its order then follows from "
                "the seed, as it does with several ranks."
            )

    # An iterable dataset's position is its own, and so is that of a StatefulDataLoader.

    def _own_state(self) -> dict[str, Any] | None:
        """Return the position that a StatefulDataLoader or an iterable dataset tells itself; ``None`` of others."""
        remembered = self._sharding.position.own_state
        if isinstance(remembered, Exception):
            raise remembered
        if remembered is not None or not self._reads:
            return remembered
        theirs = getattr(self._loader, "state_dict", None)
        if theirs is not None:
            return {"loader": theirs()}
        tells = getattr(self.dataset, "state_dict", None) if self._is_iterable and self.num_workers == 0 else None
        return {"dataset": tells()} if tells is not None else None

    def _remember(self) -> None:
        """Keep the position before a batch that is fetched ahead of the loop."""
        position = self._sharding.position
        if position.own_state is None and is_ahead():
            try:
                position.own_state = copy.deepcopy(self._own_state())
            except Exception as error:  # noqa: BLE001 - raised where somebody asks: most loops never do
                position.own_state = error


def batches_of(loader: DataLoader[Any]) -> tuple[str, Any]:
    """Return the sampler of what a loader fetches at once, and the name of the attribute that holds it."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return name, getattr(loader, name)


def innermost(loader: DataLoader[Any]) -> object:
    """Return the sampler that decides the order."""
    name, items = batches_of(loader)
    return getattr(items, "sampler", items) if name == "batch_sampler" or isinstance(items, BatchSampler) else items


def is_torchs(thing: object, cls: type) -> bool:
    """Return whether an object is of a class of torch, or of torchdata's of the same name, and not of a subclass."""
    kind = type(thing)
    return kind is cls or (kind.__name__ == cls.__name__ and kind.__module__.startswith("torchdata."))


def copied(loader: Loader, attributes: dict[str, Any]) -> Loader:
    """Return a copy of a loader with other attributes: no constructor is guessed, and a subclass keeps its own."""
    result = copy.copy(loader)
    result.__dict__.update(attributes, **{ITERATOR: None})  # which may hold workers of the loader's own
    return result


def only_moved(loader: DataLoader[Any], sharding: Sharding) -> ShardedLoader[Any]:
    """Return a loader that keeps its samples and their order, and knows where its loop is.

    Where its own sampler takes this rank's share, the samples are fetched with random numbers of this rank's own.
    """
    sharding.copy_ahead &= sharding.device.type != "cpu"
    sharding.items_per_step = getattr(batches_of(loader)[1], "batch_size", None) or 1
    shuffle = RememberedShuffle.of(innermost(loader)) if _is_plain(loader) else None
    return ShardedLoader(copied(loader, {}) if shuffle is None else _with_order(loader, shuffle), sharding)


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Return whether nothing but torch's own batch sampler is around the sampler that decides the order."""
    items = batches_of(loader)[1]
    return items is innermost(loader) or type(items) is BatchSampler


def _with_order(loader: Loader, sampler: Any) -> Loader:
    """Return a copy of a loader with another order of its samples."""
    name, items = batches_of(loader)
    attributes = {"sampler": sampler}
    if items is not innermost(loader):
        attributes[name] = type(items)(sampler, items.batch_size, items.drop_last)
    return copied(loader, attributes)


# Loops over loaders


def lockstep_of(loader: Any) -> Lockstep[Any] | None:
    """Return the loop in step that is under way over a loader; ``None`` where there is none."""
    loader = _under_bars(loader)
    if isinstance(loader, ShardedLoader):
        return loader._sharding.lockstep
    return loader if isinstance(loader, Lockstep) else None


def _under_bars(loader: Any) -> Any:
    """Return the iterable under a progress bar, which may be shown on one rank only."""
    while not isinstance(loader, DataLoader) and isinstance(getattr(loader, "iterable", None), Iterable):
        loader = loader.iterable
    return loader


def batches_left(loader: Any) -> int | None:
    """Return the number of batches of the next iteration over a loader on this rank; ``None`` if it is unknown."""
    inner = _under_bars(loader)
    if isinstance(inner, Lockstep) or (isinstance(inner, ShardedLoader) and inner._sharding.uneven):
        return None
    try:
        length = len(loader)
        if not isinstance(inner, ShardedLoader) or length != len(inner):
            return length
        return inner.batches_to_come()
    except TypeError:
        return None
