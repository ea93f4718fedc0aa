"""Random number generators: seed them, carry their state to a rank, lend them for a moment."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from distwrap.checks import SEED
from distwrap.group.world import current_world


@dataclass(frozen=True)
class RandomState:
    """The state of torch's CPU generator, of `random`, and of numpy where it is in use."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RandomState:
        """Read the states of this process."""
        numpy = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None)

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


def seed_everything(seed: int) -> int:
    """Seed torch (all devices), `random` and numpy alike on every rank, and remember the seed for the loaders.

    Model initialisation and dropout then start alike everywhere; workers of loaders that go through `shard_loader`
    get a stream of their own on each rank.

    Args:
        seed: a whole number from 0 to 2**63 - 1.

    Returns:
        The seed.

    Raises:
        OptionError: it is no such number.

    Example:
        >>> seed_everything(7)
        7
    """
    seed = SEED("seed", seed)
    world = current_world()
    world.options = replace(world.options, seed=seed)
    torch.manual_seed(seed)
    _seed_generators(seed)
    return seed


def mix(*parts: int | str) -> int:
    """Hash several numbers into one seed of 63 bits, so that neighbouring ranks get unrelated streams.

    Example:
        >>> mix(0, 1) == mix(1, 0)
        False
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class BorrowedRandomness:
    """A stream of random numbers of its own behind the global generators: theirs while lent, the caller's else.

    Custom samplers draw from the global generators, or from one of their own, which is lent too. With the same seed on
    every rank and in each epoch, all ranks see the same order, and the training loop's random numbers stay untouched.
    """

    def __init__(self, seed: int, *generators: torch.Generator) -> None:
        self._seed, self._generators = seed, generators
        self._state: tuple[RandomState, list[torch.Tensor]] | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Swap the streams for the time of a ``with``."""
        outside = self._capture()
        if self._state is None:
            _seed_generators(self._seed)
            for generator in self._generators:
                generator.manual_seed(self._seed)
        else:
            self._restore(self._state)
        try:
            yield
        finally:
            self._state = self._capture()
            self._restore(outside)

    def _capture(self) -> tuple[RandomState, list[torch.Tensor]]:
        return RandomState.capture(), [generator.get_state() for generator in self._generators]

    def _restore(self, state: tuple[RandomState, list[torch.Tensor]]) -> None:
        state[0].restore()
        for generator, own in zip(self._generators, state[1], strict=True):
            generator.set_state(own)


@contextmanager
def preserved() -> Iterator[None]:
    """Give the caller's random numbers back afterwards, whatever was drawn or seeded inside."""
    outside = RandomState.capture()
    try:
        yield
    finally:
        outside.restore()


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
