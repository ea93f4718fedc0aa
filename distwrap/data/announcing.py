"""The line that says how a loader is divided, once for each place in the user's code."""

from contextlib import suppress
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from distwrap.data.indices import Mode, repeated
from distwrap.data.sharded import is_torchs
from distwrap.data.sharding import Sharding
from distwrap.group.world import World, say_once
from distwrap.supervision.activity import Activity
from distwrap.wording import named_ranks

_ORDERS = {"torch": "the order of torch's DistributedSampler", "stream": "the same order on any number of ranks"}
_IN_WORDS = {"exact": "each sample once", "drop": "samples that do not divide evenly are left out"}


def summary(loader: DataLoader[Any], sharded: DataLoader[Any], sharding: Sharding, mode: Mode, batch_size: str) -> str:
    """Return in words the samples of a step, the steps of an epoch, and how the ranks share the data."""
    words = []
    sampler, world_size, together = sharding.sampler, sharding.world_size, sharding.items_per_step
    assert sampler is not None
    if is_torchs(loader.batch_sampler, BatchSampler):
        words.append(f"{together // world_size} a rank x {world_size} ranks = {together} a step")
    with suppress(TypeError):  # a sampler without a length
        steps = f"{len(sharded)} step{'' if len(sharded) == 1 else 's'}"
        words.append(f"{steps} an epoch ({len(loader)} in one process)")
    what = "samples" if loader.batch_sampler is None or is_torchs(loader.batch_sampler, BatchSampler) else "batches"
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
    if batch_size == "global" and mode == "exact" and over and not loader.drop_last:
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


def announce(world: World, text: str) -> None:
    """Print a line about a loader once for each place in the user's code."""
    site = world.part(Activity).site
    say_once(f"loader {site}", f"loader at {site}: {text}")
