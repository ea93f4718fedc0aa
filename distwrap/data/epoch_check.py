"""Check that the ranks' loops over one loader are in the same epoch and order, without any rank waiting for another.

A rank that goes through a shuffled loader alone, as ``next(iter(loader))`` under ``if rank() == 0`` does, is an epoch
ahead of the others from then on: the shares are of different shuffles, and samples are repeated and left out. So are
the shares of ranks that have split the data differently, or seeded a sampler apart. Of an
iterable dataset that nobody divides, all ranks have the same batches.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Subset

from distwrap._internals.torch_tree import tree_leaves
from distwrap.data.position import Position
from distwrap.errors import LoaderError
from distwrap.group.world import say
from distwrap.model.checks.in_sync import fingerprint
from distwrap.seeding import mix
from distwrap.supervision.channel import Channel
from distwrap.wording import named_ranks

_REMEMBERED = 8  # epochs


class EpochCheck:
    """Check of one loader on one rank.

    Args:
        channel: to the other ranks.
        rank: this rank.
        world_size: how many ranks there are.
        name: of the loader, alike on every rank.
        site: file and line where the loader was sharded.
        position: the position of this rank's loop.
        order: returns what tells this rank's order of the epoch from another.
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
        order: Callable[[], str] = str,
        epochs_matter: bool = True,
    ) -> None:
        self._channel, self._rank, self._key, self.site = channel, rank, f"loader/{name}", site
        self._others = [other for other in range(world_size) if other != rank]
        self._position, self._order, self._epochs_matter = position, order, epochs_matter
        self._orders: dict[str, str] = {}
        self._left: list[tuple[int, int]] = []  # epochs, and how many batches this rank took of each
        self._first_batches_compared = False

    def epochs(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield an epoch's batches; raise an error where another rank has left the epoch after fewer of them."""
        taken, epoch = 0, None
        try:
            for batch in batches:
                taken += 1
                if taken == 1:
                    epoch = self._position.epoch
                    self._orders = dict([*self._orders.items(), (str(epoch), self._order())][-_REMEMBERED:])
                    self._channel.note(self._key, json.dumps([epoch, self._left, self._orders]), self)
                if taken & (taken - 1) == 0:
                    self._check_order()
                    if taken > 1 and self._epochs_matter and not self._position.epoch_is_explicit:
                        self._check_others(epoch, taken)
                yield batch
        finally:
            if epoch is not None:
                self._left = [*self._left, (epoch, taken)][-_REMEMBERED:]

    def _check_order(self) -> None:
        """Compare with one other rank, so that each pair of neighbours is compared by one of them."""
        other = self._others[self._rank % len(self._others)]
        theirs = json.loads(self._channel.noted(self._key, other) or "[0, [], {}]")[2]
        for epoch, order in self._orders.items():
            if theirs.get(epoch, order) != order:
                raise LoaderError(
                    f"in epoch {epoch} of the loader sharded at {self.site}, rank {self._rank} and rank "
                    f"{other} go through the data in different orders ({order}; {theirs[epoch]}), so their "
                    "shares overlap: some samples are repeated and others left out, and samples held back for "
                    "validation may be trained on. All ranks must shard the same loaders in the same order, "
                    "and make the same splits and the same sampler orders: use "
                    "@distributed(seed=...), a generator with one seed, or decide on one rank and broadcast() "
                    "the answer."
                )

    def _check_others(self, epoch: int | None, taken: int) -> None:
        for other in self._others:
            now, left, _ = json.loads(self._channel.noted(self._key, other) or "[-1, [], {}]")
            batches = dict(left).get(epoch)
            if batches is not None and batches < taken:
                few = f"{batches} batch{'es' if batches > 1 else ''}"
                raise LoaderError(
                    f"rank {other} has taken {few} of epoch {epoch} of the loader sharded at {self.site} and "
                    f"is in epoch {now} by now, but rank {self._rank} has taken {taken} and goes on: the ranks "
                    "shuffle differently from now on, so some samples are repeated and others left out. Take a "
                    "first batch on every rank or through another loader, leave the loop on all ranks after "
                    "the same step (distwrap.lockstep), or call set_epoch() before each loop."
                )

    def first_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and print a line where the first ones of all ranks are the same."""
        for number, batch in enumerate(batches, 1):
            if number == 1:
                self._channel.note(self._key, _digest(batch), self)
            elif number & (number - 1) == 0 and self._rank == 0 and not self._first_batches_compared:
                self._compare_first_batches()
            yield batch

    def _compare_first_batches(self) -> None:
        digests = [self._channel.noted(self._key, rank) for rank in (self._rank, *self._others)]
        if all(digests):
            self._first_batches_compared = True
            if len(set(digests)) == 1:
                say(
                    f"the first batches of {named_ranks([self._rank, *self._others])} of the loader sharded at "
                    f"{self.site} are the same: the dataset seems not to be divided among the ranks. "
                    f"Let its __iter__ take every n-th item, or say shard_loader(loader, split='items')."
                )


def part_of(dataset: Any) -> str:
    """Return the length of a dataset, and a fingerprint of the indices that a `Subset` has of another."""
    words = [f"{len(dataset)} samples"] if hasattr(dataset, "__len__") else []
    while isinstance(dataset, Subset):
        try:
            indices = torch.as_tensor(dataset.indices).numpy().tobytes()
        except (TypeError, ValueError, RuntimeError):
            indices = repr(list(dataset.indices)).encode()
        words.append(f"indices {zlib.crc32(indices):x}")
        dataset = dataset.dataset
    return " of ".join(words)


def _digest(batch: Any) -> str:
    leaves = tree_leaves(batch)
    return str(mix(*(fingerprint(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)))
