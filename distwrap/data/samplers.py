"""Samplers that take a rank's share of another's order, and advance their epoch by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import DistributedSampler, Sampler

from distwrap.data import streams
from distwrap.data.permutation import Permutation
from distwrap.data.streams import Mode
from distwrap.seeding import BorrowedRandomness, mix

_BLOCK = 4096  # how many items are drawn, or computed, at a time


class Epoch:
    """Which epoch comes next: one more at each start, or what the loop says.

    Shared by the sampler and the batch sampler of a loader, so that either may be told.
    """

    def __init__(self) -> None:
        self.next = 0

    def begin(self) -> int:
        """Start an epoch, and return its number."""
        now = self.next
        self.next += 1
        return now


class Order(DistributedSampler[Any]):
    """A rank's share of the whole dataset's order, as torch's `DistributedSampler` takes it.

    torch's shuffle is that sampler's to the bit. The computed one costs the same at any size. The epoch advances by
    itself, and an explicit `set_epoch` wins.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    def __init__(
        self, dataset: Sized, rank: int, world_size: int, mode: Mode, seed: int, shuffle: Literal["", "torch", "stream"]
    ) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas=world_size,
            rank=rank,
            shuffle=bool(shuffle),
            seed=seed,
            drop_last=mode == "drop",
        )
        self.epochs = Epoch()
        self._order = shuffle
        if mode == "exact":
            self.num_samples = streams.share_size(len(dataset), rank, world_size, "exact")
            self.total_size = len(dataset)

    def __iter__(self) -> Iterator[Any]:
        # A generator, as the other samplers here: a loader with workers asks for an iterator once more than it reads,
        # and an epoch begins when its first item is asked for.
        self.epoch = self.epochs.begin()
        n, look_up = len(self.dataset), self._looks_up()  # type: ignore[arg-type]
        for first in range(self.rank, self.total_size, _BLOCK * self.num_replicas):
            positions = torch.arange(first, min(self.total_size, first + _BLOCK * self.num_replicas), self.num_replicas)
            yield from look_up(positions % n).tolist()  # past the end the order begins again, to fill the last round

    def _looks_up(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what says which samples stand at some positions of this epoch's order."""
        n = len(self.dataset)  # type: ignore[arg-type]
        if self._order == "torch":
            shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
            return lambda positions: shuffled[positions]
        if self._order == "stream":
            return Permutation(n, mix("order", self.seed, self.epoch))
        return lambda positions: positions

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.epochs.next = self.epoch = epoch


class Share(Sampler[Any]):
    """A rank's share of a custom sampler's stream, of indices or of whole batches.

    All ranks draw the same stream, from random numbers seeded alike for each epoch, and take every n-th item of it.
    """

    def __init__(self, sampler: Iterable[Any], rank: int, world_size: int, mode: Mode, seed: int) -> None:
        self.sampler, self.rank, self.world_size, self.mode, self.seed = sampler, rank, world_size, mode, seed
        self.epochs = Epoch()

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epochs.begin()
        tell = getattr(self.sampler, "set_epoch", None)
        if tell is not None:
            tell(epoch)
        yield from streams.share(self._draw(epoch), self.rank, self.world_size, self.mode)

    def __len__(self) -> int:
        return streams.share_size(len(self.sampler), self.rank, self.world_size, self.mode)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.epochs.next = epoch

    def _draw(self, epoch: int) -> Iterator[Any]:
        randomness = BorrowedRandomness(mix("sampler", self.seed, epoch))
        with randomness.lent():
            stream = iter(self.sampler)
        while True:
            with randomness.lent():
                block = list(islice(stream, _BLOCK))
            if not block:
                return
            yield from block


class ExactBatches(Sampler[list[Any]]):
    """Batches of a rank's exact share: equally many on every rank, a left-over sample in the last one."""

    def __init__(self, sampler: Order | Share, n: int, batch_size: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        world_size = sampler.num_replicas if isinstance(sampler, Order) else sampler.world_size
        self._count = streams.batch_count(n, world_size, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        yield from streams.exact_batches(self.sampler, self._count, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        return min(self._count, len(self.sampler))


class MergedBatches(Sampler[list[Any]]):
    """A rank's exact share of ready-made batches: equally many on every rank, a left-over batch in the last one."""

    def __init__(self, share: Share, n: int) -> None:
        self.sampler = share
        self._count = max(n // share.world_size, 1)

    def __iter__(self) -> Iterator[list[Any]]:
        yield from streams.merged_batches(iter(self.sampler), self._count)

    def __len__(self) -> int:
        return min(self._count, len(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.sampler.set_epoch(epoch)
