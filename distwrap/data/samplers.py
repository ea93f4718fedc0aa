"""Samplers that take a rank's share of another's order, and advance their epoch by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from distwrap.data import streams
from distwrap.data.streams import Mode
from distwrap.seeding import BorrowedRandomness, mix

_BLOCK = 4096  # how many items are drawn from a custom sampler at a time


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


class TorchOrder(DistributedSampler[Any]):
    """torch's `DistributedSampler` to the bit; the epoch advances by itself, and an explicit `set_epoch` wins.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    def __init__(self, dataset: Sized, rank: int, world_size: int, mode: Mode, shuffle: bool, seed: int) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas=world_size,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=mode == "drop",
        )
        self.epochs = Epoch()
        self._exact = mode == "exact"
        if self._exact:
            self.num_samples = streams.share_size(len(dataset), rank, world_size, "exact")
            self.total_size = len(dataset)

    def __iter__(self) -> Iterator[Any]:
        # A generator, as the other samplers here: a loader with workers asks for an iterator once more than it reads,
        # and an epoch begins when its first item is asked for.
        self.epoch = self.epochs.begin()
        if not self._exact:
            yield from super().__iter__()
            return
        # The whole order, as a world of one sees it, and then our share of it without padding.
        whole: DistributedSampler[Any] = DistributedSampler(
            self.dataset, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        whole.set_epoch(self.epoch)
        yield from islice(iter(whole), self.rank, None, self.num_replicas)

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

    def __init__(self, sampler: TorchOrder | Share, n: int, batch_size: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        world_size = sampler.num_replicas if isinstance(sampler, TorchOrder) else sampler.world_size
        self._count = streams.batch_count(n, world_size, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        yield from streams.exact_batches(list(self.sampler), self._count, self.batch_size, self.drop_last)

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
