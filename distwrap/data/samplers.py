"""Samplers that take a rank's share of another's order, and advance their epoch by themselves."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from distwrap.data import indices
from distwrap.data.indices import Mode
from distwrap.data.permutation import Permutation
from distwrap.data.position import Position, Shuffle
from distwrap.seeding import BorrowedRandomness, mix

_BLOCK = 16384  # how many items are drawn, or computed, at a time


class Order(DistributedSampler[Any]):
    """Rank's share of the whole dataset's order, as torch's `DistributedSampler` takes it.

    torch's shuffle is that sampler's to the bit. The computed one costs the same at any size. The epoch advances by
    itself, and an explicit `set_epoch` wins.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler

    Attributes:
        items: how many samples all ranks have together.
        position: the loop's position in them.
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
        self.mode, self.items = mode, len(dataset)
        self.position = Position()
        self._order = shuffle
        if mode == "exact":
            self.num_samples = indices.share_size(self.items, rank, world_size, "exact")
            self.total_size = self.items

    def __iter__(self) -> Iterator[Any]:
        # A generator, as the other samplers here: a loader with workers asks for an iterator once more than it reads,
        # and an epoch begins when its first item is asked for.
        begun, shuffle = self.position.begin(self.shuffle_of)
        self.epoch = begun.epoch
        sample_at = _permutation(self.items, shuffle)
        world_size = self.num_replicas
        end = indices.end_of_shares(begun.start, self.items, world_size, self.mode)
        for first in range(begun.start + self.rank, end, _BLOCK * world_size):
            positions = torch.arange(first, min(end, first + _BLOCK * world_size), world_size, device="cpu")
            # Past the end the order begins again, to fill the last round.
            yield from sample_at(positions % self.items).tolist()

    def shuffle_of(self, epoch: int) -> Shuffle:
        """Return an epoch's order."""
        if self._order == "torch":
            return Shuffle("torch", self.seed + epoch)
        return Shuffle(self._order, mix("order", self.seed, epoch) if self._order else 0)

    @property
    def order_in_words(self) -> str:
        """The epoch's order, in words that another order does not have."""
        order, seed = self.position.shuffle
        return f"{order} order of seed {seed}" if order else "in order"

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch."""
        self.epoch = epoch
        self.position.set_epoch(epoch)


def _permutation(n: int, shuffle: Shuffle) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from positions in an order of `n` samples to the samples there."""
    if shuffle.order == "torch":
        shuffled = torch.randperm(n, generator=_generator(shuffle.seed), device="cpu")
        return lambda positions: shuffled[positions]
    if shuffle.order == "stream":
        return Permutation(n, int(shuffle.seed))
    return lambda positions: positions


def _generator(seed: int | torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    return generator.set_state(seed) if isinstance(seed, torch.Tensor) else generator.manual_seed(seed)


class Share(Sampler[Any]):
    """Rank's share of a custom sampler's stream, of indices or of whole batches.

    All ranks draw the same stream, from random numbers seeded alike for each epoch, and take every n-th item of it.

    Attributes:
        items: how many items the sampler yields; ``None`` where it has no length.
        position: the loop's position in them.
        digest: of the beginning of the epoch's order.
    """

    def __init__(self, sampler: Iterable[Any], rank: int, world_size: int, mode: Mode, seed: int) -> None:
        self.sampler, self.rank, self.num_replicas, self.mode, self.seed = sampler, rank, world_size, mode, seed
        self.position = Position()
        self.digest = ""

    @property
    def items(self) -> int | None:
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except TypeError:
            return None

    def __iter__(self) -> Iterator[Any]:
        begun, shuffle = self.position.begin(self.shuffle_of)
        self.digest = ""
        for each in (self.sampler, getattr(self.sampler, "sampler", None)):
            getattr(each, "set_epoch", lambda _: None)(begun.epoch)
        yield from indices.share(self._draw(int(shuffle.seed)), self.rank, self.num_replicas, self.mode, begun.start)

    def __len__(self) -> int:
        return indices.share_size(len(self.sampler), self.rank, self.num_replicas, self.mode)  # type: ignore[arg-type]

    def shuffle_of(self, epoch: int) -> Shuffle:
        """Return the seed from which an epoch's order is drawn."""
        return Shuffle("sampler", mix("sampler", self.seed, epoch))

    @property
    def order_in_words(self) -> str:
        """The epoch's order, in words that another order does not have."""
        return f"{type(self.sampler).__name__}'s order {self.digest}"

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch."""
        self.position.set_epoch(epoch)

    def _draw(self, seed: int) -> Iterator[Any]:
        inner = (self.sampler, getattr(self.sampler, "sampler", None))
        own = {id(g): g for g in (getattr(each, "generator", None) for each in inner) if isinstance(g, torch.Generator)}
        randomness = BorrowedRandomness(seed, *own.values())
        with randomness.lent():
            stream = iter(self.sampler)
        while True:
            with randomness.lent():
                block = list(islice(stream, _BLOCK))
            if not block:
                return
            if not self.digest and " at 0x" not in (words := repr(block)):  # an address is no rank's fault
                self.digest = f"{zlib.crc32(words.encode()):x}"
            yield from block


class ExactBatches(Sampler[list[Any]]):
    """Batches of a rank's exact share: equally many on every rank, with what is left over in the last one.

    Args:
        sampler: takes the rank's share.
        batch_size: samples a batch; ``None`` where the share is of ready-made batches.
        drop_last: whether what is left over is dropped.
    """

    def __init__(self, sampler: Order | Share, batch_size: int | None, drop_last: bool = False) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        count = self.count(self.sampler.position.next.start)
        if self.batch_size is None:
            yield from indices.merged_batches(self.sampler, count)
        else:
            yield from indices.exact_batches(self.sampler, count, self.batch_size, self.drop_last)

    def count(self, start: int = 0) -> int:
        """Return how many batches are left from a place in the order."""
        left, world_size = (self.sampler.items or 0) - start, self.sampler.num_replicas
        if self.batch_size is None:
            return max(left // world_size, 1)
        return indices.batch_count(left, world_size, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        return min(self.count(), len(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch."""
        self.sampler.set_epoch(epoch)


class RememberedShuffle(RandomSampler):
    """`RandomSampler` with the same order as torch's, that remembers how the order was drawn.

    Attributes:
        drawn: the last epoch's order.
    """

    drawn: Shuffle | None = None

    def __iter__(self) -> Iterator[int]:
        if self.generator is not None:
            self.drawn = Shuffle("torch", self.generator.get_state())
            yield from super().__iter__()
            return
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())  # as RandomSampler draws it
        self.drawn = Shuffle("torch", seed)
        generator = torch.Generator().manual_seed(seed)
        yield from torch.randperm(len(self.data_source), generator=generator, device="cpu").tolist()
