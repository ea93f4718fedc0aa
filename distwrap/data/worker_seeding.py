"""Random numbers where samples are fetched, in a loader's workers or in the rank itself.

With indices, each batch has random numbers of its own: they follow from the seed, the epoch, the step and the rank. So
the augmentation is the same for any number of workers, and in an epoch that goes on where a run was cut off. The seed
of a batch travels with its indices. An iterable dataset has a stream of random numbers for each worker and epoch.
"""

from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from distwrap._internals.python import GeneratorMemory
from distwrap.data.position import Position
from distwrap.seeding import GENERATORS, RandomState, mix, seed_generators

_MASK = 2**63 - 1


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


class SeededIndices(Sampler[Any]):
    """A sampler's indices, each item with the seed of its batch in front.

    Args:
        sampler: what yields the indices of this rank's batches.
        position: the loop's position in the epoch that begins.
        epoch: that epoch, int64, where the sampler does not begin it; in shared memory where workers outlive it.
        items_per_step: how many of the order's items all ranks take in a step.
        seed: of the run and the loader.
    """

    def __init__(
        self,
        sampler: Any,
        position: Position,
        epoch: torch.Tensor | None,
        items_per_step: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._sampler, self._position, self._epoch, self._items_per_step = sampler, position, epoch, items_per_step
        self._seed, self._rank, self._world_size = seed, rank, world_size

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        begun = self._position.next
        epoch = begun.epoch if self._epoch is None else int(self._epoch)
        for step, indices in enumerate(self._sampler, -(-begun.start // self._items_per_step)):
            yield batch_seed(self._seed, epoch, self._rank, self._world_size, step), indices

    def __len__(self) -> int:
        return len(self._sampler)


class SeededFetch(Dataset[Any]):
    """Dataset and collate function of a loader in one: fetches and collates a batch with its own random numbers.

    torch's fetcher looks `SeededIndices` up in the dataset, which hands them on to the collate function.

    Args:
        dataset: the user's dataset.
        collate: the user's collate function.
        batched: whether the indices are those of a batch.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool) -> None:
        self.dataset, self._collate, self._batched = dataset, collate, batched
        self.generators: Set[str] = GENERATORS
        self._in_worker = False
        self._is_first = True
        self._quiet: GeneratorMemory | None = None  # where the batches so far have drawn nothing

    def __getitem__(self, seeded_indices: tuple[int, Any]) -> Any:
        return seeded_indices

    __getitems__ = __getitem__

    def __call__(self, seeded_indices: tuple[int, Any]) -> Any:
        seed, indices = seeded_indices
        if self._in_worker:
            seed_generators(seed, self.generators)
            return self._fetch(indices)
        # In the rank's own process the random numbers are the training loop's, and are given back. That costs more
        # than many a batch: after a first one that has drawn nothing, torch's alone are, and a look at the others tells
        # whether a batch draws after all, which is then fetched again.
        if self._quiet is not None:
            before, torchs = self._quiet.read(), torch.get_rng_state()
            torch.default_generator.manual_seed(seed)
            try:
                batch = self._fetch(indices)
            finally:
                torch.set_rng_state(torchs)
                draws = self._quiet.read() != before
                if draws:
                    self._quiet.write(before)
            if not draws:
                return batch
            self._quiet = None
        outside = RandomState.capture()
        seed_generators(seed)
        memory = GeneratorMemory() if self._is_first else None
        before = memory.read() if memory is not None else []
        try:
            return self._fetch(indices)
        finally:
            if memory is not None and memory.is_known and memory.read() == before:
                self._quiet = memory
            self._is_first = False
            outside.restore()

    def _fetch(self, indices: Any) -> Any:
        dataset = self.dataset
        if not self._batched:
            return self._collate(dataset[indices])
        fetch_all = getattr(dataset, "__getitems__", None)  # as torch's fetcher does
        return self._collate(fetch_all(indices) if fetch_all else [dataset[index] for index in indices])

    def enter_worker(self, info: Any, seed_of: Callable[[int], int]) -> None:
        """Note that this is a worker's copy."""
        self._in_worker = True


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
