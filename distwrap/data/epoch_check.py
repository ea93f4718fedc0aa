"""Check that the ranks' loops over one loader are in the same epoch and order, without any rank waiting for another.

A rank that goes through a shuffled loader alone, as ``next(iter(loader))`` under ``if rank() == 0`` does, is an epoch
ahead of the others from then on: the shares are of different shuffles, and samples are repeated and left out. So are
the shares of ranks that have split the data differently, seeded a sampler apart, or read an iterable dataset in another
order. Of one that nobody divides, all ranks have the same batches. Each rank compares with the next one alone.
"""

import json
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Subset

from distwrap._internals.torch_tree import tree_leaves
from distwrap.data.position import Position
from distwrap.errors import LoaderError
from distwrap.group.tensors_apart import bytes_of
from distwrap.group.world import say
from distwrap.model.checks.in_sync import fingerprint
from distwrap.seeding import mix
from distwrap.supervision.channel import Channel

_REMEMBERED = 16  # epochs, and looks at an order
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Pass:
    """Pass over a loader that is under way.

    Attributes:
        epoch: its epoch, once it has a batch.
    """

    epoch = -1


class EpochCheck:
    """Check of one loader on one rank.

    Args:
        channel: to the other ranks.
        rank: this rank.
        world_size: how many ranks there are.
        name: of the loader, alike on every rank.
        site: file and line where the loader was sharded.
        position: the position of this rank's loop.
        order: returns what tells this rank's order of the epoch, up to a number of batches, from another.
        epochs_matter: whether an epoch differs from the next.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        world_size: int,
        name: str,
        site: str,
        position: Position,
        order: Callable[[int], str] = str,
        epochs_matter: bool = True,
    ) -> None:
        self._channel, self._rank, self._key, self.site = channel, rank, f"loader/{name}", site
        self._next, self._last = (rank + 1) % world_size, world_size - 1
        self._position, self._order, self._epochs_matter = position, order, epochs_matter
        self._orders: dict[str, str] = {}
        self._taken: dict[int, int] = {}  # batches of each epoch
        self._passes = WeakSet[_Pass]()
        self._are_divided = False

    def begin(self, is_stream: bool, told: torch.Tensor | None) -> Callable[[int, Any], None]:
        """Return the observer of a pass that begins, which looks at its batches after powers of two.

        Args:
            is_stream: whether it goes through an iterable dataset.
            told: its second number is a digest of that dataset's first items, or 0.
        """
        if is_stream:
            return partial(self._look_at_stream, told)
        this = _Pass()
        self._passes.add(this)
        return partial(self._look, this)

    def _look(self, this: _Pass, number: int, batch: Any) -> None:
        if number == 1:
            this.epoch = self._position.epoch
        self._taken[this.epoch] = number
        if number & (number - 1):
            return
        orders = {**self._orders, f"{this.epoch}/{number}": self._order(number)}
        self._orders = dict(list(orders.items())[-_REMEMBERED:])
        self._taken = dict(list(self._taken.items())[-_REMEMBERED:])
        under_way = {each.epoch for each in self._passes}
        left = {epoch: taken for epoch, taken in self._taken.items() if epoch not in under_way}
        self._channel.note(self._key, json.dumps([this.epoch, left, self._orders]), self)
        now, left, theirs = json.loads(self._channel.noted(self._key, self._next) or "[-1, {}, {}]")
        for place, order in self._orders.items():
            if theirs.get(place, order) != order:
                raise LoaderError(
                    f"in epoch {place.split('/')[0]} of the loader sharded at {self.site}, rank {self._rank} and rank "
                    f"{self._next} go through the data in different orders ({order}; {theirs[place]}), so their "
                    "shares overlap: some samples are repeated and others left out, and samples held back for "
                    "validation may be trained on. All ranks must shard the same loaders in the same order, "
                    "and make the same splits and the same sampler orders: use "
                    "@distributed(seed=...), a generator with one seed, or decide on one rank and broadcast() "
                    "the answer."
                )
        batches = left.get(str(this.epoch), number)
        if batches < number and self._epochs_matter and not self._position.epoch_is_explicit:
            few = f"{batches} batch{'es' if batches > 1 else ''}"
            raise LoaderError(
                f"rank {self._next} has taken {few} of epoch {this.epoch} of the loader sharded at {self.site} and "
                f"is in epoch {now} by now, but rank {self._rank} has taken {number} and goes on: the ranks "
                "shuffle differently from now on, so some samples are repeated and others left out. Take a "
                "first batch on every rank or through another loader, leave the loop on all ranks after "
                "the same step (distwrap.lockstep), or call set_epoch() before each loop."
            )

    def _look_at_stream(self, told: torch.Tensor | None, number: int, batch: Any) -> None:
        if number & (number - 1):
            return
        if number == 1:
            items = 0 if told is None else int(told[1])
            self._channel.note(self._key, json.dumps([self._position.epoch, digest(batch), items]), self)
            return
        noted = (self._channel.noted(self._key, rank) for rank in (self._rank, self._next, self._last))
        mine, theirs, last = (json.loads(each or "[-1, 0, 0]") for each in noted)
        if mine[0] == theirs[0] and mine[2] and theirs[2] and mine[2] != theirs[2]:
            raise LoaderError(
                f"the iterable dataset of the loader sharded at {self.site} yields other items on rank {self._rank} "
                f"than on rank {self._next}, and each takes every n-th of them, so some items are repeated and others "
                "left out. Say shard_loader(loader, split='dataset') if it takes its rank's part itself, or "
                "split='items' if it yields the same samples, though not with the same numbers. If it shuffles, let it "
                "draw from torch, random or numpy, which begin alike on all ranks, or seed its generator by the epoch."
            )
        if self._rank == 0 and last[0] == mine[0] and not self._are_divided:
            self._are_divided = True
            if last[1] == mine[1]:
                say(
                    f"the first batches of rank 0 and rank {self._last} of the loader sharded at {self.site} are the "
                    "same: the dataset seems not to be divided among the ranks. Let its __iter__ take every n-th item, "
                    "or say shard_loader(loader, split='items')."
                )


def part_of(dataset: Any) -> str:
    """Return a fingerprint of the indices that a `Subset` has of another dataset."""
    words = []
    while isinstance(dataset, Subset):
        try:
            indices = bytes_of(torch.as_tensor(dataset.indices))
        except (TypeError, ValueError, RuntimeError):
            indices = repr(list(dataset.indices)).encode()
        words.append(f"indices {zlib.crc32(indices):x}")
        dataset = dataset.dataset
    return " of ".join(words)


def digest(items: Any) -> int:
    """Return a number that tells a batch, or items, from others."""
    leaves = tree_leaves(items)
    words = (fingerprint(leaf) if isinstance(leaf, torch.Tensor) else _ADDRESS.sub("", repr(leaf)) for leaf in leaves)
    return mix(*words) or 1
