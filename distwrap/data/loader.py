"""`shard_loader` and the user's own loader with this rank's share of its indices.

The loader is copied, not built again: a subclass keeps its attributes, and no constructor is guessed. In the copy the
sampler and batch sampler are exchanged for ones that take a share of the same order.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from distwrap._internals.torch_data import held_iterators
from distwrap.checks import one_of
from distwrap.data import iterable_shards
from distwrap.data.dispatch import Dispatch
from distwrap.data.epoch_check import EpochCheck, part_of
from distwrap.data.indices import Mode, repeated
from distwrap.data.iterable_shards import Split
from distwrap.data.position import Position
from distwrap.data.samplers import ExactBatches, Order, RememberedShuffle, Share
from distwrap.data.sharded import (
    Item,
    Loader,
    ShardedLoader,
    Sharding,
    batches_of,
    copied,
    innermost,
    is_torchs,
    only_moved,
)
from distwrap.errors import LoaderError
from distwrap.group.tensors_apart import bytes_of
from distwrap.group.world import RunPart, World, current_world, say_once
from distwrap.model.checks.optimizers import Optimizers
from distwrap.model.checks.same_inputs import SameInputs
from distwrap.seeding import mix
from distwrap.supervision.activity import Activity
from distwrap.wording import named_ranks

Modes = Literal["auto", "pad", "exact", "drop", "same"]
_Divided = Literal["auto", "pad", "exact", "drop"]
BatchSize = Literal["per_rank", "global"]
Orders = Literal["auto", "torch", "stream"]

MOST_SHUFFLED_BY_TORCH = 10**7  # samples

_ORDERS = {"torch": "the order of torch's DistributedSampler", "stream": "the same order on any number of ranks"}
_IN_WORDS = {"exact": "each sample once", "drop": "samples that do not divide evenly are left out"}

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
    """Return the same loader for this rank's share of the data; in a single process, of all data in its own order.

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
        A loader of the same class, before a copy of yours. Its epochs advance by themselves, and ``set_epoch(n)`` says
        which one comes next. ``state_dict()`` and ``load_state_dict()`` hold the position in the middle of an epoch,
        for any number of ranks. Type checkers see a `distwrap.data.ShardedLoader`; ``assert isinstance(loader,
        YourLoader)`` tells them the class.

    Raises:
        LoaderError: the loader cannot be sharded safely; the message says what to write instead.

    Example:
        >>> loader = shard_loader(DataLoader(range(10), batch_size=2))
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
    plain: DataLoader[Any] = loader
    if isinstance(loader, ShardedLoader):
        known_as, plain = loader._sharding, loader._loader
        takes_share = known_as.world_size > 1 or known_as.sampler is not None
        if takes_share and not known_as.same and (known_as.rank, known_as.world_size) != here:
            raise LoaderError(
                f"the loader was sharded for rank {known_as.rank} of {known_as.world_size}, {but_here}. "
                f"Hand shard_loader() the plain loader."
            )
        if takes_share or (alone and known_as.device == where and seed is None and order == "auto"):
            return loader
    own, *its_place = _sampler_of_a_share(plain)
    if mode == "same" and not alone:
        return _same_on_all(plain, world, Sharding(where, copy_ahead=copy_ahead, same=True), seed, order)
    if own is not None and tuple(its_place) != here:
        raise LoaderError(
            f"the loader's {type(own).__name__} is for rank {its_place[0]} of {its_place[1]}, {but_here}. "
            f"Hand shard_loader() a plain loader, or make the sampler after setup_process_group()."
        )
    if own is not None:
        # A StatefulDataLoader asks its own sampler for a state.
        whose = (0, 1) if alone or hasattr(plain, "state_dict") else here
        fetching_seed = _fetching_seed(plain, world, world.count("loader"))
        return only_moved(plain, Sharding(where, *whose, copy_ahead=copy_ahead, seed=fetching_seed))
    iterable = isinstance(plain.dataset, IterableDataset)
    shuffles = iterable or not isinstance(innermost(plain), SequentialSampler)
    number = world.count("shuffled loader") if shuffles else 0
    if alone and (iterable or (seed is None and order == "auto")):
        return only_moved(plain, Sharding(where, copy_ahead=copy_ahead))
    held = held_iterators(plain)
    if held:
        plain = _with_epochs(plain, held)
    order_seed = seed if seed is not None else _order_seed(plain, world, number)
    sharding = Sharding(where, *here, copy_ahead=copy_ahead, order_seed=order_seed, endless=bool(held))
    if iterable:
        return _shard_iterable(plain, world, sharding, "auto" if mode == "same" else mode, batch_size, order, split)
    if split != "auto":
        raise LoaderError(f"split={split!r} is for an IterableDataset, but {type(plain.dataset).__name__} has indices.")
    return _shard_indices(plain, world, sharding, "auto" if mode == "same" else mode, batch_size, order)


def _same_on_all(
    loader: DataLoader[Any], world: World, sharding: Sharding, seed: int | None, order: Orders
) -> ShardedLoader[Any]:
    """Return a loader that gives all ranks the same batches, without this being an error."""
    if isinstance(loader.dataset, IterableDataset):
        result = only_moved(loader, sharding)
    else:
        number = world.count("shuffled loader") if not isinstance(innermost(loader), SequentialSampler) else 0
        sharding.order_seed = seed if seed is not None else _order_seed(loader, world, number)
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
    sharding.compares = split == "auto"
    number = world.count("loader")
    sharding.seed = _fetching_seed(loader, world, number)
    if split == "dispatch":
        sharding.dispatch = Dispatch("drop" if mode == "auto" else mode)
    else:
        sharding.uneven = "" if mode == "exact" else "pad" if mode == "pad" else "shortest"
        sharding.epoch_check = _epoch_check(world, number, sharding.position, str)
    _announce(world, f"{type(loader.dataset).__name__}, divided: {how}")
    return ShardedLoader(copied(loader, {**attributes, "dataset": dataset}), sharding)


def _shard_indices(
    loader: DataLoader[Any], world: World, sharding: Sharding, mode: _Divided, batch_size: BatchSize, order: Orders
) -> ShardedLoader[Any]:
    kind, items = batches_of(loader)
    cuts = is_torchs(items, BatchSampler)  # into batches, so that these can be cut anew
    source = items.sampler if cuts else items
    in_order = (SequentialSampler, list, tuple, range) if cuts else SequentialSampler
    shuffles = not isinstance(innermost(loader), in_order)
    whole = batch_size == "global" and getattr(items, "drop_last", False)  # as many steps as in one process
    chosen: Mode = (("drop" if whole else "pad") if shuffles else "exact") if mode == "auto" else mode
    world_size = sharding.world_size
    if not cuts and batch_size == "global":
        raise LoaderError(
            f"batch_size='global' divides the loader's batch size, but its {kind} is a {type(items).__name__}, "
            f"which makes its own. Make its batches smaller, and use batch_size='per_rank'."
        )
    if chosen == "exact" and _length(source) % world_size and not cuts and kind == "sampler":
        # Items of this loader are whole batches, or single samples: what they hold cannot be merged.
        raise LoaderError(
            f"the loader fetches item by item (batch_size=None), so {_length(items)} items cannot be "
            f"divided over {world_size} ranks with each item once and equally many steps on all ranks. Say "
            "mode='pad' or mode='drop'."
        )
    size = _size_per_rank(items.batch_size, world_size, batch_size) if cuts else 1
    sharding.items_per_step = size * world_size
    shard = (sharding.rank, world_size, chosen)
    sampler: Order | Share
    if kind == "batch_sampler" and not cuts:
        sampler, sharding.unit = Share(items, *shard, sharding.order_seed, world_size), "batches"
        attributes: dict[str, Any] = {kind: ExactBatches(sampler, None) if chosen == "exact" else sampler}
    else:
        sampler = _share_of(source, loader.dataset, shard, sharding, order)
        attributes = {"sampler": sampler}
        if cuts:
            cut = ExactBatches if chosen == "exact" else BatchSampler
            attributes[kind] = cut(sampler, size, items.drop_last)
        if kind == "batch_sampler":
            attributes["batch_size"] = size
    number = world.count("loader")
    sharding.seed = _fetching_seed(loader, world, number)
    sharding.sampler, sharding.position = sampler, sampler.position
    part = cache(partial(part_of, loader.dataset))

    def order_in_words(batches: int) -> str:
        return f"{len(loader.dataset)} samples{part()}, {sampler.order_in_words(batches)}"  # type: ignore[arg-type]

    check = _epoch_check(world, number, sampler.position, order_in_words, shuffles and chosen != "exact")
    sharding.epoch_check = check
    # Of the workers' base seed, which is not the loop's to give: its numbers are those of other numbers of ranks too.
    attributes["generator"] = torch.Generator(torch.get_default_device())
    result: ShardedLoader[Any] = ShardedLoader(copied(loader, attributes), sharding)
    if world_size > 1:
        if chosen != "drop":  # which was asked for by name
            _refuse_no_steps(loader, result, attributes.get(kind), world_size)
        _announce(world, _summary(loader, result, sharding, chosen, batch_size, cuts))
    return result


def _share_of(
    sampler: Any, dataset: Any, shard: tuple[int, int, Mode], sharding: Sharding, order: Orders
) -> Order | Share:
    seed = sharding.order_seed
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
    return Share(sampler, *shard, seed, sharding.items_per_step)


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
        number: of the loader among the shuffled ones, of which no two have one order; 0 for others.
    """
    if loader.generator is not None:
        state = bytes_of(loader.generator.get_state()).hex()
        seed, number = mix("generator", state), world.part(_Generators).uses(loader.generator, state) if number else 0
        return seed if number < 2 else mix("loader's order", seed, number)
    base = world.options.seed or 0
    return base if number < 2 else mix("loader's order", base, number)


class _Generators(RunPart):
    """Generators of a run's loaders, which are left alone, and how many loaders each shuffles in one state."""

    def __init__(self, world: World) -> None:
        self._used: dict[int, tuple[torch.Generator, str, int]] = {}

    def uses(self, generator: torch.Generator, state: str) -> int:
        """Count a loader, so that another one, or the same one in the next epoch, has another order."""
        _, before, uses = self._used.pop(id(generator), (generator, state, 0))
        uses = uses + 1 if before == state else 1
        self._used = dict([*list(self._used.items())[-63:], (id(generator), (generator, state, uses))])
        return uses


def _epoch_check(
    world: World, number: int, position: Position, order: Callable[[int], str], epochs_matter: bool = True
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


def _with_epochs(loader: Loader, held: list[str]) -> Loader:
    """Return a copy of an endless loader, as timm's and ultralytics' are, whose sampler is the one that is repeated.

    Their aim, workers that outlive an epoch, is torch's ``persistent_workers``.

    Args:
        loader: of a class of its own.
        held: its attributes that hold an iterator over it.

    Raises:
        LoaderError: the sampler is not one that repeats another.
    """
    name, repeating = batches_of(loader)
    if hasattr(repeating, "__len__") or not hasattr(repeating, "sampler"):
        raise LoaderError(
            f"the {type(loader).__name__} holds an iterator in its attribute {held[0]!r}, made before the loader was "
            f"sharded, which would go on over undivided data. Make the iterator in __iter__, or shard a plain "
            f"DataLoader with persistent_workers=True."
        )
    plain: dict[str, Any] = {**dict.fromkeys(held), name: repeating.sampler}
    return copied(loader, {**plain, "persistent_workers": loader.num_workers > 0})


def _refuse_no_steps(loader: DataLoader[Any], sharded: DataLoader[Any], batches: Any, world_size: int) -> None:
    """Raise LoaderError if ``drop_last=True`` leaves no rank a batch where one process has some."""
    with suppress(TypeError):  # a sampler without a length
        steps = batches.count() if isinstance(batches, ExactBatches) else len(sharded)  # the same on every rank
        if getattr(batches, "drop_last", False) and len(loader) and not steps:
            raise LoaderError(
                f"shard_loader(): over {world_size} ranks this loader has no step, where one process has "
                f"{len(loader)}: a rank's share fills no batch, and drop_last=True leaves out what fills none. Take a "
                "smaller batch_size, shard_loader(loader, batch_size='global'), or fewer ranks."
            )


def _summary(
    loader: DataLoader[Any], sharded: DataLoader[Any], sharding: Sharding, mode: Mode, batch_size: str, cuts: bool
) -> str:
    """Return in words the samples of a step, the steps of an epoch, and how the ranks share the data."""
    words = []
    sampler, world_size, together = sharding.sampler, sharding.world_size, sharding.items_per_step
    assert sampler is not None
    if cuts:
        words.append(f"{together // world_size} a rank x {world_size} ranks = {together} a step")
    with suppress(TypeError):  # a sampler without a length
        steps = f"{len(sharded)} step{'' if len(sharded) == 1 else 's'}"
        words.append(f"{steps} an epoch ({len(loader)} in one process)")
    what = sharding.unit
    meaning = _IN_WORDS.get(mode) or f"all ranks get equally many {what}{_repeated(sampler.items, world_size)}"
    words.append(f"mode {mode} ({meaning})")
    if mode == "exact" and 0 < (sampler.items or 0) < world_size:
        without = named_ranks(range(sampler.items or 0, world_size))
        words.append(
            f"{without} of {world_size} will have no batch, as there are fewer {what} than ranks: in training the "
            "others would wait for a step in vain, so take fewer ranks, or mode='pad'"
        )
    shuffle = sampler.shuffle_of(0).order
    order = {"": "in order", "sampler": f"order of its {type(getattr(sampler, 'sampler', None)).__name__}"}
    words.append(order.get(shuffle, f"shuffled in {_ORDERS.get(shuffle, shuffle)}"))
    over = (sampler.items or 0) % together % world_size
    if batch_size == "global" and mode == "exact" and over and not getattr(batches_of(loader)[1], "drop_last", False):
        words.append(
            f"the last {over} samples do not divide evenly, so that in training the last step differs from "
            "that of one process: leave them out by drop_last=True, or repeat some by mode='pad'"
        )
    return "; ".join(words)


def _repeated(items: int | None, world_size: int) -> str:
    """Return how many items some rank gets a second time, so that all get equally many; empty where none."""
    if items is None:
        return ", a few of them twice where they do not divide evenly"
    over = repeated(items, world_size)
    return f", {over} of them {'twice' if over <= items else 'repeated'}" if over else ""


def _announce(world: World, text: str) -> None:
    """Print a line about a loader once for each place in the user's code."""
    site = world.part(Activity).site
    say_once(f"loader {site}", f"loader at {site}: {text}")
