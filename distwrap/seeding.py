"""Random number generators: seed them, carry their state to a rank, lend them for a moment, keep a run's own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from distwrap.checks import SEED
from distwrap.errors import CheckpointError
from distwrap.group import world
from distwrap.group.world import RunPart, World, active_world, current_world

GENERATORS = frozenset({"torch", "random", "numpy"})
_SEEDS = 1000  # of generators that are gone, whose numbers a run still counts


@dataclass(frozen=True)
class RandomState:
    """The state of torch's CPU generator, of `random`, and of numpy where it is in use; the seed of the next runs."""

    torch: torch.Tensor
    python: Any
    numpy: Any
    seed: int | None

    @classmethod
    def capture(cls) -> RandomState:
        """Read the states of this process."""
        numpy = sys.modules.get("numpy")
        numpys = numpy.random.get_state() if numpy else None
        return cls(torch.get_rng_state(), random.getstate(), numpys, world.given_seed)

    def __reduce__(self) -> Any:
        # As a tensor, multiprocessing would put it into shared memory, and hold a file open as long as it lives.
        return _unpacked, (bytes(self.torch.tolist()), self.python, self.numpy, self.seed)

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        world.given_seed = self.seed
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


def _unpacked(numbers: bytes, python: Any, numpy: Any, seed: int | None) -> RandomState:
    return RandomState(torch.frombuffer(bytearray(numbers), dtype=torch.uint8), python, numpy, seed)


def seed_everything(seed: int, *, apart: bool = False) -> int:
    """Seed torch (all devices), `random` and numpy with the same seed on every rank, and remember it for the loaders.

    Model initialisation and dropout then begin alike everywhere, and loaders from `shard_loader` fetch their samples
    with random numbers that differ between ranks. No two of the generators draw the same numbers.

    Args:
        seed: a whole number from 0 to 2**63 - 1.
        apart: give each rank random numbers of its own, for dropout and noise in the loop; call it after the model and
            the data are made. The loaders' seed stays the same on every rank, and in a single process nothing differs.

    Returns:
        The seed.

    Raises:
        OptionError: `seed` is not such a number.

    Example:
        >>> seed_everything(7)
        7
    """
    seed = SEED("seed", seed)
    here = current_world()
    here.options = replace(here.options, seed=seed)
    if active_world() is None:
        world.given_seed = seed
    own = mix("apart", seed, here.layout.rank) if apart and here.layout.rank else seed
    torch.manual_seed(own)
    seed_generators(own)
    return seed


def rank_generator(seed: int, device: torch.device | str | None = None) -> torch.Generator:
    """Return a generator whose numbers differ between ranks, for random numbers that the loop draws itself.

    Batches that are drawn by ``torch.randint``, or noise, would otherwise be the same on all ranks, which would do the
    same work. Ranks that train one replica together, as under ``tensor_parallel``, get the same numbers.

    The generator belongs to the state of the run that `run_state` returns: a run that resumes goes on with its numbers,
    whether the generator is made before the state is loaded or after. The resumed run finds it by its seed, and the
    n-th generator of one seed is the n-th again. So make it before the loop, or give each epoch a seed of its own.

    Args:
        seed: a whole number from 0 to 2**63 - 1, the same on all ranks.
        device: the device of the tensors that are drawn; by default the CPU.

    Returns:
        The generator. On rank 0, and in a single process, its seed is `seed` itself.

    Raises:
        OptionError: `seed` is not such a number.
        CheckpointError: the state that was loaded for this generator is not that of a generator.

    Example:
        >>> rank_generator(7).initial_seed()
        7
    """
    seed, share = SEED("seed", seed), current_world().layout.rank
    generator = _RankGenerator(device if device is not None else "cpu")
    generator.manual_seed(mix("apart", seed, share) if share else seed)
    current_world().part(RankGenerators).add(seed, generator)
    return generator


class _RankGenerator(torch.Generator):
    """Generator that can be referred to weakly, which torch's own cannot in torch 2.6."""


class _Made(NamedTuple):
    """Name of a generator, which it also has in a run that resumes: the n-th of a seed and a type of device."""

    seed: int
    device: str
    number: int


class RankGenerators(RunPart):
    """Generators that `rank_generator` has made in a run, which live as long as the loop holds them.

    A state that is loaded for a generator that does not exist yet waits for it, and is saved again until then.
    """

    def __init__(self, world: World) -> None:
        self._live: WeakValueDictionary[_Made, torch.Generator] = WeakValueDictionary()
        self._count: Counter[tuple[int, str]] = Counter()
        self._loaded: dict[_Made, torch.Tensor] = {}

    def add(self, seed: int, generator: torch.Generator) -> None:
        """Give a new generator its name, and the state that was loaded for it, if any.

        Raises:
            CheckpointError: this state is not that of a generator.
        """
        kind = seed, generator.device.type
        if len(self._count) >= _SEEDS and kind not in self._count:  # as in a loop whose every step has its own seed
            held = {(made.seed, made.device) for made in self._live.keys() | self._loaded.keys()}
            self._count = Counter({kind: count for kind, count in self._count.items() if kind in held})
        self._count[kind] += 1
        made = _Made(*kind, self._count[kind])
        if made in self._loaded:
            try:
                generator.set_state(self._loaded.pop(made))
            except (RuntimeError, TypeError) as error:
                raise CheckpointError(
                    f"the checkpoint has a state for rank_generator({seed}) that is not the state of a generator on "
                    f"{generator.device} ({error}). Was the file changed after save()?"
                ) from error
        self._live[made] = generator

    def states(self) -> list[list[Any]]:
        """Return the seed, type of device, number and state of each generator that exists or is waited for."""
        states = self._loaded | {made: generator.get_state() for made, generator in self._live.items()}
        return [[*made, state] for made, state in sorted(states.items(), key=lambda item: item[0])]

    def load_states(self, states: list[list[Any]]) -> None:
        """Give what `states` returned to the generators that exist, and to others as soon as they are made."""
        self._loaded = {}
        for seed, device, number, state in states:
            made = _Made(seed, device, number)
            if made in self._live:
                self._live[made].set_state(state.cpu())
            elif number > self._count[seed, device]:
                self._loaded[made] = state.cpu()


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
    No two of the generators share a stream.
    """

    def __init__(self, seed: int, *generators: torch.Generator) -> None:
        self._seed, self._generators = seed, generators
        self._state: tuple[RandomState, list[torch.Tensor]] | None = None
        self._outside: tuple[RandomState, list[torch.Tensor]] | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Swap the streams for the time of a ``with``."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """Put this stream behind the generators, if it is not there already."""
        if self._outside is not None:
            return
        self._outside = self._capture()
        if self._state is None:
            seed_generators(self._seed)
            for number, generator in enumerate(self._generators):
                generator.manual_seed(mix("generator", self._seed, number))
        else:
            self._restore(self._state)

    def give_back(self) -> None:
        """Put the caller's stream back behind the generators, if it is not there already."""
        if self._outside is not None:
            self._state = self._capture()
            self._restore(self._outside)
            self._outside = None

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


def seed_generators(seed: int, names: Set[str] = GENERATORS) -> None:
    """Seed this process's global generators of some names, each to a stream of its own.

    All three are the Mersenne Twister, and from one number numpy's would draw what torch's draws, or `random`'s.
    """
    if "torch" in names:
        torch.default_generator.manual_seed(seed)
    if "random" in names:
        random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in names:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
