"""Where samples are fetched, in a loader's workers or in the rank itself: random numbers apart, and the rank's part.

torch makes a fetcher when an iteration begins, in the process that fetches, and hands it the dataset. That is the
moment at which a stream of random numbers can begin, also in workers that live for many epochs, and at which an
iterable dataset is asked for its items.

With indices, each batch has random numbers of its own: they follow from the seed, the epoch, the step and the rank. So
the augmentation is the same for any number of workers, and in an epoch that goes on where a run was cut off.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.utils.data import _DatasetKind, get_worker_info

from distwrap.data.iterable_shards import Part
from distwrap.seeding import RandomState, mix

Fetch = Callable[[Any], Any]
Seeded = Callable[[Fetch, Iterator[int]], Fetch]

_MASK = 2**63 - 1


def worker_seed(seed: int, epoch: int, rank: int, worker: int, workers: int) -> int:
    """Return what a worker's random numbers begin with; within an epoch no two agree, not in their low 32 bits either.

    Args:
        seed: of the run and the loader.
        workers: how many each rank has.

    Example:
        >>> len({worker_seed(7, 0, rank, worker, 64) % 2**32 for rank in range(64) for worker in range(64)})
        4096
    """
    return (mix("workers", seed, epoch) + rank * workers + worker) & _MASK


def batch_seed(seed: int, epoch: int, rank: int, world_size: int, step: int) -> int:
    """Return what the random numbers of a batch begin with; within an epoch no two agree."""
    return (mix("batches", seed, epoch) + step * world_size + rank) & _MASK


class Fetching:
    """How a rank's samples are fetched: a worker's init function, or, without workers, a context to begin in.

    Args:
        seed: of the run and the loader.
        rank: this rank.
        world_size: how many ranks.
        part: how to take this rank's part of an iterable dataset; ``None`` for a dataset with indices.
        told: the epoch that begins, and its first step; shared with workers that outlive an epoch.
        then: the user's own init function.
    """

    def __init__(
        self,
        seed: int,
        rank: int,
        world_size: int,
        part: Part | None,
        told: torch.Tensor,
        then: Callable[[int], None] | None = None,
    ) -> None:
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._part, self._told, self._then = part, told, then
        self._mine: set[str] = set()

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed = worker_seed(self._seed, int(self._told[0]), self._rank, worker, info.num_workers)
        _seed(seed, _GENERATORS)
        object.__setattr__(info, "seed", seed)
        if self._part is not None:
            self._part.present(info)
        before = _fingerprints()
        if self._then is not None:
            self._then(worker)
        # What the user's own function seeds is the user's.
        self._mine = {name for name, state in _fingerprints().items() if before.get(name, state) == state}
        create: Any = _DatasetKind.create_fetcher
        workers = info.num_workers

        def create_fetcher(kind: int, dataset: Any, *rest: Any) -> Any:
            _seed(worker_seed(self._seed, int(self._told[0]), self._rank, worker, workers), self._mine)
            return self._fetcher(create, self._seeder, worker, workers, kind, dataset, *rest)

        _replace(create_fetcher)  # in this worker's process alone

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make the fetcher of an iterator without workers, that is made meanwhile."""
        create: Any = _DatasetKind.create_fetcher

        def create_fetcher(kind: int, dataset: Any, *rest: Any) -> Any:
            return self._fetcher(create, _Lender, 0, 1, kind, dataset, *rest)

        _replace(create_fetcher)
        try:
            yield
        finally:
            _replace(create)

    def _fetcher(
        self, create: Any, seeded: Seeded, worker: int, workers: int, kind: int, dataset: Any, *rest: Any
    ) -> Any:
        """Make a fetcher of this rank's part, or one whose batches are seeded."""
        epoch, first = self._told.tolist()
        if self._part is not None:
            return create(kind, self._part.of(dataset, epoch), *rest)
        fetcher, steps = create(kind, dataset, *rest), count(first + worker, workers)
        seeds = (batch_seed(self._seed, epoch, self._rank, self._world_size, step) for step in steps)
        fetcher.fetch = seeded(fetcher.fetch, seeds)
        return fetcher

    def _seeder(self, fetch: Fetch, seeds: Iterator[int]) -> Fetch:
        """Fetch in a worker, where the random numbers are nobody else's."""

        def fetch_seeded(index: Any) -> Any:
            _seed(next(seeds), self._mine)
            return fetch(index)

        return fetch_seeded


def _replace(create_fetcher: Any) -> None:
    _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]


class _Lender:
    """Fetches in the rank's own process, where the random numbers are the training loop's: it gets them back.

    That costs more than many a batch, so it is left out when the first one has drawn none.
    """

    def __init__(self, fetch: Fetch, seeds: Iterator[int]) -> None:
        self._fetch, self._seeds = fetch, seeds
        self._draws: bool | None = None

    def __call__(self, index: Any) -> Any:
        if self._draws is False:
            return self._fetch(index)
        outside = RandomState.capture()
        _seed(next(self._seeds), _GENERATORS)
        before = _fingerprints() if self._draws is None else {}
        try:
            return self._fetch(index)
        finally:
            if self._draws is None:
                after = _fingerprints()
                self._draws = any(after[name] != state for name, state in before.items())
            outside.restore()


_GENERATORS = {"torch", "random", "numpy"}


def _seed(seed: int, names: set[str]) -> None:
    if "torch" in names:
        torch.default_generator.manual_seed(seed)
    if "random" in names:
        random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in names:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _fingerprints() -> dict[str, Any]:
    state = RandomState.capture()
    found = {"torch": state.torch.tolist(), "random": state.python}
    if state.numpy is not None:
        found["numpy"] = (state.numpy[1].tobytes(), state.numpy[2:])
    return found
