"""`shard_loader` and the user's own loader with this rank's share of its indices.

The loader is copied, not built again: a subclass keeps its attributes, and no constructor is guessed. In the copy the
sampler and batch sampler are exchanged for ones that take a share of the same order.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, cast, get_args

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from distwrap._internals.torch_data import held_iterators
from distwrap.checks import one_of
from distwrap.data import iterable_shards
from distwrap.data.announcing import announce, summary
from distwrap.data.dispatch import Dispatch
from distwrap.data.empty_batches import refuse_no_steps
from distwrap.data.endless import with_epochs
from distwrap.data.epoch_check import EpochCheck, part_of
from distwrap.data.indices import Mode
from distwrap.data.iterable_shards import Split
from distwrap.data.position import Position
from distwrap.data.samplers import ExactBatches, Order, RememberedShuffle, Share
from distwrap.data.sharded import Item, ShardedLoader, innermost, is_torchs, only_moved, sharded_copy
from distwrap.data.sharding import Sharding
from distwrap.errors import LoaderError
from distwrap.group.world import World, current_world
from distwrap.model.checks.optimizers import Optimizers
from distwrap.model.checks.same_inputs import SameInputs
from distwrap.seeding import mix
from distwrap.supervision.activity import Activity

Modes = Literal["auto", "pad", "exact", "drop", "same"]
_Divided = Literal["auto", "pad", "exact", "drop"]
BatchSize = Literal["per_rank", "global"]
Orders = Literal["auto", "torch", "stream"]

MOST_SHUFFLED_BY_TORCH = 10**7  # samples

# Attributes by which samplers that take a share know their rank, and how many there are; also with "_" in front.
_PLACES = [("rank", "num_replicas"), ("rank", "world_size"), ("rank", "num_processes"), ("rank", "num_shards")]
_PLACES += [("shard_id", "num_shards"), ("process_index", "num_processes"), ("replica_id", "num_replicas")]


def next_epoch(loader: DataLoader[Any]) -> int:
    """Return the next epoch of a sharded loader, 0 of any other loader."""
    return loader._sharding.position.next.epoch if isinstance(loader, ShardedLoader) else 0


def shard_loader(
    loader: DataLoader[Item],
    *,
    mode: Modes = "auto",
    batch_size: BatchSize = "per_rank",
    order: Orders = "auto",
    split: Split = "auto",
    seed: int | None = None,
    device: torch.device | str | None = None,
    copy_ahead: bool = False,
) -> ShardedLoader[Item]:
    """Return the same loader for this rank's share of the data; in a single process on the CPU, the loader itself.

    The loader's own order is divided: shuffled as by ``DistributedSampler``, or the order of its sampler or batch
    sampler. A loader that already has a ``DistributedSampler`` is left alone. An iterable dataset is divided item by
    item among the ranks and their workers; ranks whose data end at different times stop together, as in `lockstep`.

    Args:
        loader: a ``DataLoader``, or an object of a subclass.
        mode: how samples are divided that do not divide evenly. ``"pad"``: all ranks take equally many samples, a few
            of them twice. ``"exact"``: each sample is taken once; with at least one sample for each rank all ranks
            still take equally many batches, and a left-over sample joins the last one. ``"drop"``: left-over samples
            are left out. ``"auto"``: exact if the loader does not shuffle, and pad if it does, or drop if it has
            ``drop_last`` and `batch_size` is global, so that there are as many steps as in one process. The loader's
            own ``drop_last`` holds in every mode. With an iterable dataset ``"drop"``, which is also ``"auto"``, ends
            with the first rank that is out of data; ``"pad"`` ends with the last, while the others begin their data
            again; with ``"exact"`` each rank ends by itself. ``"same"`` divides nothing: all ranks get all samples in
            one order, which is otherwise an error when a wrapped model trains on them.
        batch_size: ``"per_rank"`` keeps the loader's batch size, so that the global batch grows with the number of
            ranks; ``"global"`` divides it by the number of ranks.
        order: how a loader with ``shuffle=True`` shuffles. ``"torch"``: exactly as ``DistributedSampler``, with time
            and memory that grow with the dataset. ``"stream"``: by a computed permutation, which costs the same at any
            size. ``"auto"``: torch's order up to 10 million samples. In a single process it applies only if it is
            given.
        split: how an iterable dataset is divided. ``"items"``: every n-th item. ``"dataset"``: the dataset takes its
            rank's part itself. ``"dispatch"``: only rank 0 reads it, and sends each rank a whole batch in turn; `mode`
            decides about the last turn. ``"auto"``: by the means of ``datasets`` or webdataset, else ``"items"``; a
            dataset whose code mentions ranks is an error then.
        seed: the seed of the shuffle. By default it is that of the loader's ``generator``, else it follows from the
            run's seed, else it is 0; each further shuffled loader of the run gets another one. In a single process it
            applies only if it is given.
        device: where the batches go; by default this rank's device. ``"cpu"`` leaves them where they are.
        copy_ahead: on CUDA, copy each batch to the device while the step before still computes.

    Returns:
        A loader of the same class. Its epochs advance by themselves, and ``set_epoch(n)`` says which one comes next.
        ``state_dict()`` and ``load_state_dict()`` hold the position in the middle of an epoch, for any number of ranks.
        Type checkers see a `distwrap.data.ShardedLoader`; ``assert isinstance(loader, YourLoader)`` tells them the
        class.

    Raises:
        LoaderError: the loader cannot be sharded safely; the message says what to write instead.

    Example:
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> shard_loader(loader) is loader  # one process
        True
        >>> for batch in loader:
        ...     break
        >>> position = loader.state_dict()
        >>> again = shard_loader(DataLoader(range(10), batch_size=4))
        >>> again.load_state_dict(position)
        >>> list(again)
        [tensor([2, 3, 4, 5]), tensor([6, 7, 8, 9])]
    """
    if not isinstance(loader, DataLoader):
        way = ""
        if type(loader).__name__ == "WebLoader":  # a dataset too
            way = "Its DataLoader is .pipeline[0]."
        elif isinstance(loader, (Dataset, list, tuple, torch.Tensor)):
            way = "Put the dataset into one: shard_loader(DataLoader(dataset, batch_size=…))."
        raise LoaderError(f"shard_loader() takes a DataLoader, not a {type(loader).__qualname__}. {way}".rstrip())
    one_of("mode", get_args(Modes))("mode", mode)
    one_of("batch_size", get_args(BatchSize))("batch_size", batch_size)
    one_of("order", get_args(Orders))("order", order)
    one_of("split", get_args(Split))("split", split)
    return shard(loader, mode, batch_size, order, split, seed=seed, device=device, copy_ahead=copy_ahead)


def shard(
    loader: DataLoader[Item],
    mode: Modes,
    batch_size: BatchSize,
    order: Orders,
    split: Split,
    *,
    seed: int | None,
    device: torch.device | str | None,
    copy_ahead: bool,
) -> ShardedLoader[Item]:
    """Do what `shard_loader` does, with options that are known; a proof takes other ones in their place."""
    world = current_world()
    world.part(Activity).record("shard_loader")
    if world.tells_others:
        world.part(Optimizers)  # which look for a model that nobody has wrapped
    where = torch.device(device) if device is not None else world.device
    here, alone = (world.layout.rank, world.layout.size), world.placement.world_size == 1
    but_here = f"but this is rank {here[0]} of {here[1]}"
    if isinstance(loader, ShardedLoader) and (loader._sharding.world_size > 1 or loader._sharding.sampler is not None):
        known_as = loader._sharding
        if not known_as.same and (known_as.rank, known_as.world_size) != here:
            raise LoaderError(
                f"the loader was sharded for rank {known_as.rank} of {known_as.world_size}, {but_here}. "
                f"Hand shard_loader() the plain loader."
            )
        return loader
    if mode == "same" and alone:
        mode = "auto"
    elif mode == "same":
        return _same_on_all(loader, world, Sharding(where, copy_ahead=copy_ahead, same=True), seed, order)
    given, *its_place = _sampler_of_a_share(loader)
    if given is not None and tuple(its_place) != here:
        raise LoaderError(
            f"the loader's {type(given).__name__} is for rank {its_place[0]} of {its_place[1]}, {but_here}. "
            f"Hand shard_loader() a plain loader, or make the sampler after setup_process_group()."
        )
    if given is not None:
        # A StatefulDataLoader asks its own sampler for a state.
        whose = (0, 1) if alone or hasattr(loader, "state_dict") else here
        fetching_seed = _fetching_seed(loader, world, world.count("loader"))
        return only_moved(loader, Sharding(where, *whose, copy_ahead=copy_ahead, seed=fetching_seed))
    iterable = isinstance(loader.dataset, IterableDataset)
    shuffled = world.count("shuffled loader") if iterable or not isinstance(innermost(loader), SequentialSampler) else 1
    if alone and (iterable or (seed is None and order == "auto")):
        return only_moved(loader, Sharding(where, copy_ahead=copy_ahead))
    held = held_iterators(loader)
    if held:
        loader = with_epochs(loader, held)
    order_seed = seed if seed is not None else _order_seed(loader, world, shuffled)
    sharding = Sharding(where, *here, copy_ahead=copy_ahead, order_seed=order_seed, endless=bool(held))
    if iterable:
        return _shard_iterable(loader, world, sharding, mode, batch_size, order, split)
    if split != "auto":
        raise LoaderError(
            f"split={split!r} is for an IterableDataset, but {type(loader.dataset).__name__} has indices."
        )
    result = _shard_indices(loader, world, sharding, mode, batch_size, order)
    if alone:  # the loader itself here too
        loader.__dict__.update(result.__dict__)
        loader.__class__ = type(result)
        return cast("ShardedLoader[Item]", loader)
    return result


def _same_on_all(
    loader: DataLoader[Item], world: World, sharding: Sharding, seed: int | None, order: Orders
) -> ShardedLoader[Item]:
    """Return a loader that gives all ranks the same batches, without this being an error."""
    if isinstance(loader.dataset, IterableDataset):
        result = only_moved(loader, sharding)
    else:
        shuffled = world.count("shuffled loader") if not isinstance(innermost(loader), SequentialSampler) else 1
        sharding.order_seed = seed if seed is not None else _order_seed(loader, world, shuffled)
        result = _shard_indices(loader, world, sharding, "pad", "per_rank", order)
    world.part(SameInputs).loops[result] = lambda: sharding.position.now is not None
    return result


def _shard_iterable(
    loader: DataLoader[Item],
    world: World,
    sharding: Sharding,
    mode: _Divided,
    batch_size: BatchSize,
    order: Orders,
    split: Split,
) -> ShardedLoader[Item]:
    attributes: dict[str, Any] = {"generator": torch.Generator(torch.get_default_device())}
    if order != "auto":
        raise LoaderError(f"order={order!r}: the order of an IterableDataset is its own. Leave order at 'auto'.")
    if batch_size == "global":
        batches: Any = loader.batch_sampler
        if batches is None:
            raise LoaderError("batch_size='global' divides the loader's batch size, but its batch_size is None.")
        size = _size_per_rank(batches.batch_size, sharding.world_size, batch_size)
        attributes["batch_size"] = size
        attributes["batch_sampler"] = BatchSampler(batches.sampler, size, batches.drop_last)
    dataset, sharding.by_itself, how = iterable_shards.split(loader.dataset, split, sharding.rank, sharding.world_size)
    number = world.count("loader")
    sharding.seed = _fetching_seed(loader, world, number)
    if split == "dispatch":
        sharding.dispatch = Dispatch("drop" if mode == "auto" else mode)
    else:
        sharding.uneven = "" if mode == "exact" else "pad" if mode == "pad" else "shortest"
        sharding.epoch_check = _epoch_check(world, number, sharding.position, str)
    announce(world, f"{type(loader.dataset).__name__}, divided: {how}")
    return sharded_copy(loader, sharding, {**attributes, "dataset": dataset})


def _shard_indices(
    loader: DataLoader[Item], world: World, sharding: Sharding, mode: _Divided, batch_size: BatchSize, order: Orders
) -> ShardedLoader[Item]:
    batches: Any = loader.batch_sampler
    in_order = (SequentialSampler, list, tuple, range) if is_torchs(batches, BatchSampler) else SequentialSampler
    shuffles = not isinstance(innermost(loader), in_order)
    whole = batch_size == "global" and getattr(loader, "drop_last", False)  # as many steps as in one process
    chosen: Mode = (("drop" if whole else "pad") if shuffles else "exact") if mode == "auto" else mode
    order_seed, world_size = sharding.order_seed, sharding.world_size
    shard = (sharding.rank, world_size, chosen)
    attributes: dict[str, Any] = {}
    sampler: Order | Share
    if is_torchs(batches, BatchSampler):
        size = _size_per_rank(batches.batch_size, world_size, batch_size)
        sampler = _share_of(batches.sampler, loader.dataset, shard, order_seed, order)
        sharding.items_per_step = size * world_size
        if chosen == "exact":
            _length(batches.sampler)
        cut = ExactBatches if chosen == "exact" else BatchSampler
        attributes = {"sampler": sampler, "batch_size": size, "batch_sampler": cut(sampler, size, batches.drop_last)}
    else:
        sharding.items_per_step = world_size
        items, kind = (loader.sampler, "sampler") if batches is None else (batches, "batch_sampler")
        if batch_size == "global":
            raise LoaderError(
                f"batch_size='global' divides the loader's batch size, but its {kind} is a {type(items).__name__}, "
                f"which makes its own. Make its batches smaller, and use batch_size='per_rank'."
            )
        if chosen == "exact" and _length(items) % world_size and batches is None:
            # Items of this loader are whole batches, or single samples: what they hold cannot be merged.
            raise LoaderError(
                f"the loader fetches item by item (batch_size=None), so {_length(items)} items cannot be "
                f"divided over {world_size} ranks with each item once and equally many steps on all ranks. Say "
                "mode='pad' or mode='drop'."
            )
        if batches is None:
            attributes[kind] = sampler = _share_of(items, loader.dataset, shard, order_seed, order)
        else:
            sampler = share = Share(items, *shard, order_seed)
            attributes[kind] = ExactBatches(share, None) if chosen == "exact" else share
    number = world.count("loader")
    sharding.seed = _fetching_seed(loader, world, number)
    sharding.sampler, sharding.position = sampler, sampler.position
    part = cache(partial(part_of, loader.dataset))
    sharding.epoch_check = _epoch_check(
        world, number, sampler.position, lambda: f"{part()}, {sampler.order_in_words}", shuffles and chosen != "exact"
    )
    # Of the workers' base seed, which is not the loop's to give: its numbers are those of other numbers of ranks too.
    attributes["generator"] = torch.Generator(torch.get_default_device())
    result = sharded_copy(loader, sharding, attributes)
    if world_size > 1:
        if chosen != "drop":  # which was asked for by name
            refuse_no_steps(loader, result, world_size)
        announce(world, summary(loader, result, sharding, chosen, batch_size))
    return result


def _share_of(sampler: Any, dataset: Any, shard: tuple[int, int, Mode], seed: int, order: Orders) -> Order | Share:
    # The sampler may run over something else than the dataset, as a part of it.
    random = is_torchs(sampler, RandomSampler) or type(sampler) is RememberedShuffle
    shuffles = random and not sampler.replacement
    plain = type(sampler) is SequentialSampler or shuffles
    if plain and hasattr(dataset, "__len__") and len(sampler) == len(sampler.data_source) == len(dataset):
        if not shuffles:
            return Order(dataset, *shard, seed, "")
        if order == "auto":
            order = "torch" if len(dataset) <= MOST_SHUFFLED_BY_TORCH else "stream"
        return Order(dataset, *shard, seed, order)
    if order != "auto":
        raise LoaderError(
            f"order={order!r} says how a loader with shuffle=True shuffles, but the order of this one is its "
            f"{type(sampler).__name__}'s. Leave order at 'auto'."
        )
    return Share(sampler, *shard, seed)


def _size_per_rank(size: int, world_size: int, meaning: BatchSize) -> int:
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


def _fetching_seed(loader: DataLoader[Any], world: World, number: int) -> int:
    """Return the seed with which a loader's samples are fetched: another one for each loader of a run."""
    base = loader.generator.initial_seed() if loader.generator is not None else torch.initial_seed()
    return mix("loader", world.options.seed if world.options.seed is not None else base, number)


def _order_seed(loader: DataLoader[Any], world: World, number: int) -> int:
    """Return the seed of a loader's order, alike on all ranks.

    Args:
        loader: the user's loader, whose generator's state, if any, decides the seed.
        world: of the run.
        number: of the loader among the shuffled ones, of which no two have one order.
    """
    if loader.generator is not None:
        return mix("generator", loader.generator.get_state().numpy().tobytes().hex())  # which is left alone
    base = world.options.seed or 0
    return base if number == 1 else mix("loader's order", base, number)


def _epoch_check(
    world: World, number: int, position: Position, order: Callable[[], str], epochs_matter: bool = True
) -> EpochCheck | None:
    """Return a check of the run's loader of that number, where there are others, and a channel to them."""
    if world.channel is None or world.placement.world_size == 1:
        return None
    place, site = world.placement, world.part(Activity).site
    return EpochCheck(
        world.channel, place.rank, place.world_size, str(number), site, position, order, epochs_matter=epochs_matter
    )


def _sampler_of_a_share(loader: DataLoader[Any]) -> tuple[Any, int, int]:
    """Return the sampler that takes a share already, its rank, and how many there are; ``None`` where there is none."""
    for sampler in (loader.sampler, loader.batch_sampler, innermost(loader)):
        for rank_name, size_name in _PLACES:
            rank, size = (getattr(sampler, name, getattr(sampler, f"_{name}", None)) for name in (rank_name, size_name))
            if isinstance(rank, int) and isinstance(size, int):
                return sampler, rank, size
    return None, 0, 1


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise LoaderError(
            f"mode='exact' needs to know how many items {type(sampler).__name__} yields, but it has no len(). "
            f"Give it a __len__, or say mode='pad' or mode='drop'."
        ) from None
