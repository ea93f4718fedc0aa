"""Random numbers where samples are fetched, in a loader's workers or in the rank itself.

With indices, each batch has random numbers of its own: they follow from the seed, the epoch, the step and the rank. So
the augmentation is the same for any number of workers, and in an epoch that goes on where a run was cut off. The seed
of a batch travels with its indices. An iterable dataset has a stream of random numbers for each worker and epoch.
"""

import random
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from distwrap.data.position import Position
from distwrap.seeding import GENERATORS, RandomState, mix, seed_generators

_MASK = 2**63 - 1


class BorrowedRandomness:
    """A stream of random numbers of its own behind the global generators: theirs while lent, the caller's else.

    Custom samplers draw from the global generators, or from one of their own, which is lent too. With the same seed on
    every rank and in each epoch, all ranks see the same order, and the training loop's random numbers stay untouched.
    No two of the generators share a stream. numpy's is exchanged as a whole: to read its state takes 100 us.
    """

    def __init__(self, seed: int, *generators: torch.Generator) -> None:
        self._seed, self._generators = seed, (torch.default_generator, *generators)
        self._state: tuple[Any, Any, list[torch.Tensor]] | None = None
        self._outside: tuple[Any, Any, list[torch.Tensor]] | None = None
        self._numpys: Any = None

    @contextmanager
    def lent(self, seed: int | None = None) -> Iterator[None]:
        """Swap the streams for the time of a ``with``; with a seed, for one that begins there and ends with it."""
        if seed is not None:
            self._seed, self._state = seed, None
        self.take()
        try:
            yield
        finally:
            self.give_back(ends=seed is not None)

    def take(self) -> None:
        """Put this stream behind the generators, if it is not there already."""
        if self._outside is not None:
            return
        self._outside = self._capture()
        if numpy := sys.modules.get("numpy"):
            self._numpys = self._numpys or numpy.random.MT19937(0)
            numpy.random.set_bit_generator(self._numpys)
        if self._state is None:
            seed_generators(self._seed)
            for number, generator in enumerate(self._generators[1:]):
                generator.manual_seed(mix("generator", self._seed, number))
        else:
            self._restore(self._state)

    def give_back(self, *, ends: bool = False) -> None:
        """Put the caller's stream back behind the generators, if it is not there already."""
        if self._outside is not None:
            self._state = None if ends else self._capture()
            self._restore(self._outside)
            self._outside = None

    def _capture(self) -> tuple[Any, Any, list[torch.Tensor]]:
        numpy = sys.modules.get("numpy")
        numpys = numpy.random.get_bit_generator() if numpy else None
        return numpys, random.getstate(), [generator.get_state() for generator in self._generators]

    def _restore(self, state: tuple[Any, Any, list[torch.Tensor]]) -> None:
        if state[0] is not None:
            sys.modules["numpy"].random.set_bit_generator(state[0])
        random.setstate(state[1])
        for generator, own in zip(self._generators, state[2], strict=True):
            generator.set_state(own)


def worker_seed(seed: int, epoch: int, rank: int, worker: int, workers: int) -> int:
    """Return the seed of a worker; within an epoch no two agree, not in their low 32 bits either.

    Args:
        seed: of the run and the loader.
        workers: how many each rank has.

    Example:
        >>> len({worker_seed(7, 0, rank, worker, 64) % 2**32 for rank in range(64) for worker in range(64)})
        4096
    """
    return (mix("workers", seed, epoch) + rank * workers + worker) & _MASK


def batch_seed(seed: int, epoch: int, rank: int, world_size: int, step: int) -> int:
    """Return the seed of a batch; within an epoch no two agree."""
    return (mix("batches", seed, epoch) + step * world_size + rank) & _MASK


class _Seeded(NamedTuple):
    """Indices of a batch, with its seed."""

    seed: int
    indices: Any


class SeededIndices(Sampler[Any]):
    """A sampler's indices, each item with the seed of its batch.

    Args:
        sampler: what yields the indices of this rank's batches.
        position: the loop's position in the epoch that begins.
        told: that epoch, where the sampler does not begin it; in shared memory where workers outlive it.
        items_per_step: how many of the order's items all ranks take in a step.
        seed: of the run and the loader.
    """

    def __init__(
        self,
        sampler: Any,
        position: Position,
        told: torch.Tensor | None,
        items_per_step: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._sampler, self._position, self._told, self._items_per_step = sampler, position, told, items_per_step
        self._seed, self._rank, self._world_size = seed, rank, world_size

    def __iter__(self) -> Iterator[_Seeded]:
        begun = self._position.next
        epoch = begun.epoch if self._told is None else int(self._told[0])
        for step, indices in enumerate(self._sampler, -(-begun.start // self._items_per_step)):
            yield _Seeded(batch_seed(self._seed, epoch, self._rank, self._world_size, step), indices)

    def __len__(self) -> int:
        return len(self._sampler)


class SeededFetch(Dataset[Any]):
    """Dataset and collate function of a loader in one: fetches and collates a batch with its own random numbers.

    torch's fetcher looks `SeededIndices` up in the dataset, which hands them on to the collate function. All else that
    somebody asks of the dataset is the user's.

    Args:
        dataset: the user's dataset.
        collate: the user's collate function.
        batched: whether the indices are those of a batch.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool) -> None:
        self.dataset, self._collate, self._batched = dataset, collate, batched
        self.generators: Set[str] = GENERATORS
        self._own: BorrowedRandomness | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of one that is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return index if isinstance(index, _Seeded) else self.dataset[index]

    __getitems__ = __getitem__

    def __call__(self, batch: _Seeded) -> Any:
        if get_worker_info() is not None:
            seed_generators(batch.seed, self.generators)
            return self._fetch(batch.indices)
        # In the rank's own process the random numbers are the training loop's, and are given back.
        self._own = self._own or BorrowedRandomness(0)
        with self._own.lent(batch.seed):
            return self._fetch(batch.indices)

    def _fetch(self, indices: Any) -> Any:
        dataset = self.dataset
        if not self._batched:
            return self._collate(dataset[indices])
        fetch_all = getattr(dataset, "__getitems__", None)  # as torch's fetcher does
        return self._collate(fetch_all(indices) if fetch_all else [dataset[index] for index in indices])

    def enter_worker(self, info: Any, seed_of: Callable[[int], int]) -> None:
        """Do nothing more: the seed of each batch comes with it."""


class WorkerInit:
    """Init function of a rank's workers: seeds the worker, then runs the user's own.

    Args:
        source: stands in the place of the user's ``dataset``, and fetches the samples. ``enter_worker`` of a worker's
            copy is called before the user's function, and ``generators`` becomes the names of those to be seeded.
        seed: of the run and the loader.
        epoch: the one that begins.
        rank: this rank.
        then: the user's own init function.
    """

    def __init__(self, source: Any, seed: int, epoch: int, rank: int, then: Callable[[int], None] | None) -> None:
        self._source, self._seed, self._epoch, self._rank, self._then = source, seed, epoch, rank, then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed_of = partial(worker_seed, self._seed, rank=self._rank, worker=worker, workers=info.num_workers)
        seed_generators(seed_of(self._epoch), GENERATORS)
        object.__setattr__(info, "seed", seed_of(self._epoch))
        object.__setattr__(info, "dataset", self._source.dataset)
        self._source.enter_worker(info, seed_of)
        before = _fingerprints()
        if self._then is not None:
            self._then(worker)
        # What the user's own function seeds is the user's.
        after = _fingerprints()
        self._source.generators = {name for name, state in after.items() if before.get(name, state) == state}


def _fingerprints() -> dict[str, Any]:
    state = RandomState.capture()
    found = {"torch": state.torch.tolist(), "random": state.python}
    if state.numpy is not None:
        found["numpy"] = (state.numpy[1].tobytes(), state.numpy[2:])
    return found
