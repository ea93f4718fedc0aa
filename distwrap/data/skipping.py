"""A loader that begins after some batches, for runs that have saved a step, but no position."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from distwrap._internals.torch_data import IteratorHook
from distwrap.checks import whole
from distwrap.data.indices import share_size
from distwrap.data.samplers import ExactBatches
from distwrap.data.sharding import Sharding
from distwrap.errors import LoaderError

T_co = TypeVar("T_co", covariant=True)
Loader = TypeVar("Loader", bound="DataLoader[Any]")


class SkippingLoader(IteratorHook[T_co]):
    """Loader whose next iteration may leave out its first batches."""

    _sharding: Sharding

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
        batches = whole(0)("batches", batches)
        sharding = cast("SkippingLoader[Any]", self)._sharding
        begun, position = sharding.position.next, sharding.position
        with suppress(TypeError):  # of some datasets nobody knows
            if batches > (left := cast("SkippingLoader[Any]", self).batches_to_come()):
                raise LoaderError(
                    f"skip({batches}): the next epoch of this loader has {left} batches on rank {sharding.rank}."
                )
        if sharding.sampler is None and not begun.start:
            position.next = replace(begun, skip=begun.skip + batches)
        else:
            position.next = replace(begun, start=cast("SkippingLoader[Any]", self)._consumed(begun.start, batches))
        if begun is position.skipped or not begun.start + begun.skip:
            position.skipped = position.next
        position.now = None
        return self

    def batches_to_come(self) -> int:
        """Return how many batches the next iteration gives on this rank.

        Raises:
            TypeError: nobody knows.
        """
        sharding, batches = self._sharding, cast("Any", self.batch_sampler)
        begun, sampler = sharding.position.next, sharding.sampler
        if not begun.start:
            return max(0, len(self) - begun.skip)
        items = self._items()["items"]
        if items is None:
            raise TypeError(f"{type(sampler).__name__} has no length")
        left = max(0, items - begun.start)
        if isinstance(batches, ExactBatches):
            return batches.count(begun.start) if left else 0
        mode = "pad" if sampler is None else sampler.mode
        count = share_size(left, sharding.rank, sharding.world_size, mode)
        if batches is sampler or not isinstance(batches, BatchSampler):
            return count
        return count // batches.batch_size if batches.drop_last else -(-count // batches.batch_size)

    @property
    def skips_indices(self) -> bool:
        """Whether batches that are left out are not even fetched."""
        is_torchs = not hasattr(super(), "state_dict") and not self.persistent_workers
        return is_torchs and self._sharding.world_size == 1 and not isinstance(self.dataset, IterableDataset)

    def read_on(self, batches: Iterator[Any], skipped: int) -> Iterator[Any]:
        """Return an iterator without its first batches, where they were fetched."""
        return islice(batches, skipped, None) if skipped and not self.skips_indices else batches

    def fetching_after(self, skipped: int) -> dict[str, Any]:
        """Return the attribute with which torch's iterator leaves out the first batches of a single process."""
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        return {name: After(getattr(self, name), skipped)}

    def _consumed(self, start: int, taken: int) -> int:
        raise NotImplementedError

    def _items(self) -> dict[str, Any]:
        raise NotImplementedError


class After(Sampler[Any]):
    """Items of a sampler after its first ones."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self.sampler, self._skipped = sampler, skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self._skipped, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self._skipped)
