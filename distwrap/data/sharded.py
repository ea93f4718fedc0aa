"""The class of a sharded loader: the user's own class, which also knows the loop's position in its data."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, RandomSampler, SequentialSampler

from distwrap._internals.torch_data import ITERATOR, check_iterator_hook
from distwrap.data import workers
from distwrap.data.dispatch import READER
from distwrap.data.evaluations import Evaluations
from distwrap.data.indices import stream_batches
from distwrap.data.iterable_shards import DataPipeShard, IterableShard, SplitShard, StatefulShard
from distwrap.data.lockstep import in_step
from distwrap.data.position import EpochStart, Shuffle, check_state, check_stream_state, is_ahead, move
from distwrap.data.samplers import ExactBatches, Order, RememberedShuffle, Share
from distwrap.data.sharding import Sharding
from distwrap.data.skipping import SkippingLoader
from distwrap.data.worker_seeding import SeededFetch, SeededIndices, WorkerInit, worker_seed
from distwrap.devices.transfer import on_device
from distwrap.errors import LoaderError
from distwrap.group.world import active_world, current_world
from distwrap.model.checks.unwrapped import Unwrapped
from distwrap.seeding import preserved
from distwrap.supervision.activity import Activity

T_co = TypeVar("T_co", covariant=True)
Item = TypeVar("Item")
Loader = TypeVar("Loader", bound="DataLoader[Any]")


class ShardedLoader(SkippingLoader[T_co]):
    """Loader that `shard_loader` returns: of the user's own class, with this rank's share, and a position to save."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch; without a call, each epoch is one more than the last."""
        self._sharding.position.set_epoch(epoch)
        # The user's own class may have a use for it too.
        given = () if self._sharding.sampler is not None else (self.batch_sampler, innermost(self))
        for owner in (super(), *given):
            getattr(owner, "set_epoch", lambda _: None)(epoch)

    def __iter__(self) -> Any:
        sharding = self._sharding
        timed = current_world().part(Activity).timed
        if not sharding.uneven:
            return timed(self._rank_batches())
        sharding.lockstep = in_step(self, sharding.uneven, sharding.epoch_check.site if sharding.epoch_check else "")
        return timed(iter(sharding.lockstep))

    def __len__(self) -> int:
        sharding = self._sharding
        length = DataLoader.__len__(self) if sharding.endless else super().__len__()
        if sharding.dispatch is not None:
            return sharding.dispatch.length(length, sharding.rank, sharding.world_size)
        if not self._is_iterable or sharding.world_size == 1 or sharding.by_itself:
            return length
        rank = {"": sharding.rank, "pad": 0, "shortest": sharding.world_size - 1}[sharding.uneven]
        place = (rank, sharding.world_size, max(1, self.num_workers))
        return stream_batches(len(self.dataset), *place, self.batch_size or 1, self.drop_last)  # type: ignore[arg-type]

    def _rank_batches(self) -> Iterator[Any]:
        """Return an iterator over this rank's batches, which waits for no other rank."""
        sharding, world = self._sharding, current_world()
        position = sharding.position
        if sharding.world_size > 1:
            if self._reads and self.num_workers and active_world() is not None:  # else nobody would remove it
                world.part(workers.WorkerFolder)
            self._tell_epoch()
        resumes = sharding.sampler is None and position.next.start > 0
        skipped = position.next.skip
        # The run that was cut off had drawn what a loader draws at its start.
        with preserved() if position.next.start > 0 else nullcontext():
            begin = partial(DataLoader.__iter__, self) if sharding.endless else super().__iter__
            if sharding.dispatch is not None:
                batches = sharding.dispatch.batches(begin)
            else:
                batches = self._resumed() if resumes else begin()
        world.part(Activity).follow(batches)
        if self.num_workers and self._reads:
            batches = workers.explain_failures(batches)
        if sharding.sampler is None and not resumes:  # else the sampler does
            position.begin(lambda epoch: Shuffle("", 0))
        if sharding.epoch_check is not None:
            check = sharding.epoch_check
            batches = check.first_batches(batches) if self._is_iterable else check.epochs(batches)
        if sharding.device.type != "cpu":
            pinned = self.pin_memory and self._reads and sharding.dispatch is None
            batches = on_device(batches, sharding.device, sharding.copy_ahead, pinned)
        if sharding.world_size > 1:
            batches = world.part(Evaluations).watched(iter(batches), 0 if self.drop_last else sharding.repeated)
        if sharding.sampler is None:
            batches = self._remembering(batches)
        if sharding.world_size > 1 and world.tells_others:
            batches = world.part(Unwrapped).first_batches(iter(batches))
        return position.count(self.read_on(batches, skipped), skipped)

    def _same_epoch(self) -> Iterator[Any]:
        """Return an iterator for a rank that is out of batches before the others are: their next epoch is its own."""
        position = self._sharding.position
        position.next = EpochStart(position.next.epoch - 1)
        return self._rank_batches()

    def _remembering(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches; of what is fetched ahead of the loop, keep the state before."""
        sharding, stream, nothing = self._sharding, iter(batches), object()
        sharding.own_state = None
        while True:
            if sharding.own_state is None and is_ahead():
                try:
                    sharding.own_state = copy.deepcopy(self._own_state())
                except Exception as error:  # noqa: BLE001 - raised where somebody asks: most loops never do
                    sharding.own_state = error
            batch = next(stream, nothing)
            move(partial(setattr, sharding, "own_state", None))
            if batch is nothing:
                return
            yield batch

    def _own_state(self) -> dict[str, Any] | None:
        """Return the position that a StatefulDataLoader or an iterable dataset tells itself; ``None`` of others."""
        remembered = self._sharding.own_state
        if isinstance(remembered, Exception):
            raise remembered
        if remembered is not None:
            return remembered
        theirs = getattr(super(), "state_dict", None)
        if not self._reads:
            return None
        if theirs is not None:
            return {"loader": theirs()}
        tells = getattr(self.dataset, "state_dict", None) if self._is_iterable and self.num_workers == 0 else None
        return {"dataset": tells()} if tells is not None else None

    @contextmanager
    def making_iterator(self) -> Iterator[None]:
        """Put what fetches this rank's samples in the place of the user's dataset while the iterator is made."""
        alone, skipped = self._sharding.world_size == 1, self._sharding.position.next.skip
        if alone and not (skipped and self.skips_indices):
            yield
            return
        attributes = self.__dict__
        fetching = self._fetching() if not alone else self.fetching_after(skipped)
        before = {name: attributes[name] for name in fetching}
        attributes.update(fetching)
        try:
            yield
        finally:
            attributes.update(before)

    def _fetching(self) -> dict[str, Any]:
        """Return the attributes with which torch's iterator fetches this rank's samples."""
        sharding = self._sharding
        seed, place = sharding.seed, (sharding.rank, sharding.world_size)
        # A StatefulDataLoader whose state is asked for before its first epoch makes an iterator for that.
        epoch = self._tell_epoch() if sharding.epoch is None else sharding.epoch
        source: IterableShard | SeededFetch
        if self._is_iterable:
            seed_of = partial(worker_seed, seed, rank=sharding.rank, worker=0, workers=1)
            what = (self.dataset, self.collate_fn, epoch, seed_of)
            if sharding.by_itself:
                source = (StatefulShard if hasattr(self.dataset, "state_dict") else IterableShard)(*what)
            else:
                source = SplitShard(*what, sharding.order_seed, *place)
            shown = DataPipeShard(source) if isinstance(self.dataset, IterDataPipe) else source
            fetching: dict[str, Any] = {"dataset": shown, "collate_fn": source.collate}
        else:
            batches: Any = self.batch_sampler
            source = SeededFetch(self.dataset, self.collate_fn, batches is not None)
            sampler, name = (self.sampler, "sampler") if batches is None else (batches, "batch_sampler")
            told = epoch if sharding.sampler is None else None
            indices = SeededIndices(sampler, sharding.position, told, sharding.items_per_step, seed, *place)
            fetching = {"dataset": source, "collate_fn": source, name: indices}
        if self.num_workers:
            fetching["worker_init_fn"] = WorkerInit(source, seed, int(epoch), sharding.rank, self.worker_init_fn)
        return fetching

    def _tell_epoch(self) -> torch.Tensor:
        """Write the epoch that begins to where workers read it."""
        sharding = self._sharding
        if sharding.epoch is None or not self.persistent_workers:
            sharding.epoch = torch.tensor(0)
            if self.persistent_workers:
                sharding.epoch.share_memory_()  # type: ignore[no-untyped-call]
        return sharding.epoch.fill_(sharding.position.next.epoch)

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
        if self._is_iterable:
            return self._iterable_state()
        sampler, position = self._sharding.sampler, self._sharding.position
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
        self._sharding.own_state = None
        if self._is_iterable:
            self._load_iterable_state(state)
            return
        sampler = self._sharding.sampler
        theirs = getattr(super(), "load_state_dict", None)
        if theirs is not None and sampler is None and "consumed" not in state:
            theirs(state)
            return
        check_state(state, **self._items(), custom=isinstance(sampler, Share))
        if sampler is None and state["consumed"]:
            self._check_order_is_known()
        self._sharding.position.load(state)

    def _items(self) -> dict[str, Any]:
        """Return the unit in which the position counts, and how many of them there are."""
        sampler, batches = self._sharding.sampler, self.batch_sampler
        if sampler is None:
            return {"unit": "samples", "items": len(innermost(self))}  # type: ignore[arg-type]
        ready_made = sampler is batches or (isinstance(batches, ExactBatches) and batches.batch_size is None)
        return {"unit": "batches" if ready_made else "samples", "items": sampler.items}

    def _consumed(self, start: int, taken: int) -> int:
        items, batches = self._items()["items"], self.batch_sampler
        if isinstance(batches, ExactBatches) and taken >= batches.count(start):
            return int(items)
        at = start + taken * self._sharding.items_per_step
        return at if items is None else min(at, items)

    # In a single process the loader keeps its own order, until it goes on from a position.

    def _check_order_is_known(self) -> None:
        sampler = innermost(self)
        plain = self.batch_sampler is None or type(self.batch_sampler) is BatchSampler
        if not plain or not isinstance(sampler, (SequentialSampler, RememberedShuffle)):
            raise LoaderError(
                f"in a single process the order is drawn by this loader's {type(sampler).__name__}, and cannot "
                "be drawn again from a position. Say shard_loader(loader, seed=0): its order then follows from "
                "the seed, as it does with several ranks."
            )

    def _resumed(self) -> Iterator[Any]:
        """Return an iterator over the rest of an epoch, in the order that the position holds."""
        batches: Any = self.batch_sampler
        order = Order(range(self._items()["items"]), 0, 1, "pad", 0, "")
        order.position = self._sharding.position
        attributes: dict[str, Any] = {"sampler": order}
        if batches is not None:
            attributes["batch_sampler"] = type(batches)(order, batches.batch_size, batches.drop_last)
        return iter(copied(self, attributes, type(self).__bases__[1]))

    # An iterable dataset's position is its own.

    def _iterable_state(self) -> dict[str, Any]:
        sharding = self._sharding
        whose = {"rank": sharding.rank, "world_size": sharding.world_size, "epoch": sharding.position.epoch}
        if sharding.dispatch is not None:
            whose.update(rank=READER, world_size=1)  # for any number of ranks: this one's alone is to be saved
        own = self._own_state()
        if own is not None or not self._reads:
            return {**whose, **(own or {})}
        raise LoaderError(
            f"the position in {type(self.dataset).__name__} is unknown: an iterable dataset has no indices, "
            f"and {'its workers fetch ahead of the loop' if self.num_workers else 'it has no state_dict()'}. "
            "Use torchdata's StatefulDataLoader in DataLoader's place, or a dataset with state_dict() and "
            "num_workers=0, or a dataset with indices."
        )

    def _load_iterable_state(self, state: dict[str, Any]) -> None:
        place = (self._sharding.rank, self._sharding.world_size)
        check_stream_state(state, *(place if self._sharding.dispatch is None else (READER, 1)))
        if not self._reads:
            pass
        elif "loader" in state:
            super().load_state_dict(state["loader"])  # type: ignore[misc]
        else:
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        self._sharding.position.next = EpochStart(state["epoch"])

    def __reduce__(self) -> tuple[Any, ...]:
        # Neither pickle nor copy would find this class by its name; but it follows from the user's own.
        sharding = replace(self._sharding, epoch=None, epoch_check=None, lockstep=None)
        return _rebuilt, (type(self).__bases__[1], {**self.__dict__, ITERATOR: None, "_sharding": sharding})


def innermost(loader: DataLoader[Any]) -> object:
    """Return the sampler that decides the order."""
    batches: Any = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)


def is_torchs(thing: object, cls: type) -> bool:
    """Return whether an object is of a class of torch, or of torchdata's of the same name, and not of a subclass."""
    kind = type(thing)
    return kind is cls or (kind.__name__ == cls.__name__ and kind.__module__.startswith("torchdata."))


def sharded_copy(loader: DataLoader[Item], sharding: Sharding, attributes: dict[str, Any]) -> ShardedLoader[Item]:
    """Return a copy of a loader, of the same class and sharded, with other attributes."""
    result = copied(loader, {**attributes, "_sharding": sharding}, sharded_class(type(loader)))
    return cast("ShardedLoader[Item]", result)


def only_moved(loader: DataLoader[Item], sharding: Sharding) -> ShardedLoader[Item]:
    """Return a loader that keeps its samples and their order, and knows where its loop is; on the CPU the same object.

    Where its own sampler takes this rank's share, the samples are fetched with random numbers of this rank's own.
    """
    device = sharding.device
    if isinstance(loader, ShardedLoader) and loader._sharding.device == device:
        return loader
    if device.type == "cpu":
        sharding.copy_ahead = False
    else:
        loader = copied(loader, {}, type(loader))
    sampler: Any = innermost(loader)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        sampler.__class__ = RememberedShuffle
    sharding.items_per_step = getattr(loader.batch_sampler, "batch_size", None) or 1
    loader.__dict__["_sharding"] = sharding
    loader.__class__ = sharded_class(type(loader))
    return cast("ShardedLoader[Item]", loader)


def copied(loader: Loader, attributes: dict[str, Any], cls: type) -> Loader:
    """Return a copy of a loader, of a class, with other attributes."""
    result = copy.copy(loader)
    result.__dict__.update(attributes, **{ITERATOR: None})  # which may hold workers of the loader's own
    result.__class__ = cls
    return result


def _rebuilt(cls: type[DataLoader[Any]], attributes: dict[str, Any]) -> ShardedLoader[Any]:
    loader: ShardedLoader[Any] = object.__new__(sharded_class(cls))
    loader.__dict__.update(attributes)
    return loader


_classes: dict[type, type] = {}


def sharded_class(cls: type[DataLoader[Any]]) -> type:
    """Return the class of loaders of a class that are sharded."""
    if issubclass(cls, ShardedLoader):
        return cls
    if cls not in _classes:
        check_iterator_hook(cls)
        _classes[cls] = type(f"Sharded{cls.__name__}", (ShardedLoader, cls), {"__module__": cls.__module__})
    return _classes[cls]
