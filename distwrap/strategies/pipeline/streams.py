"""Random numbers of a model in stages: alike on all stages outside of the blocks, and apart in each block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from distwrap.devices.kinds import kind_of
from distwrap.seeding import GENERATORS, mix, preserved, seed_generators

_NUMBERS = 2**40  # which float64 adds up exactly over thousands of ranks


class Streams:
    """Random numbers of the passes through a model.

    All stages run the code before and between the blocks, and one of them may use what another one draws there. So a
    microbatch begins with one seed on all stages, from a number out of torch's generator, which is alike on the ranks
    of a pipeline. Each block draws from a stream of its own, seeded by that of the microbatch, which then goes on as if
    the block had drawn nothing. After a pass the generators are where they were, but for that number.

    Args:
        device: on which the model computes.

    Attributes:
        number: with which the latest pass began.
        is_on: whether it draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, kind_of(device)
        self._has_own = self._kind.random_state(device) is not None
        self._generators: frozenset[str] = frozenset()
        self.number, self.is_on, self._trains = 0, False, False
        self._begins: list[torch.Tensor] = []

    @contextmanager
    def of_pass(self, generators: frozenset[str]) -> Iterator[None]:
        """Take a number for a pass that draws from some generators, and give the caller's streams back afterwards.

        Where it draws from none, nothing is taken.
        """
        self.is_on, self._generators = bool(generators), generators
        self.number = _drawn() if self.is_on else 0
        if torch.is_grad_enabled():
            self._trains = self._trains or self.is_on  # a backward may come after another pass
        self._begins = self.states()
        with preserved() if generators == GENERATORS else nullcontext(), self.kept():
            yield

    def begin(self, microbatch: int) -> None:
        """Begin a microbatch."""
        if self.is_on:
            self._seed(mix("microbatch", self.number, microbatch), self._generators)

    @contextmanager
    def of_block(self, *, recomputed: bool = False) -> Iterator[None]:
        """Draw from a stream of a block's own, which a recomputation begins where its forward did."""
        if not (self._trains if recomputed else self.is_on):
            yield
            return
        seed = mix("block", _drawn())
        with self.kept():
            self._seed(seed, frozenset({"torch"}))
            yield

    def pass_block(self) -> None:
        """Go on as after a block, which another stage computes."""
        if self.is_on:
            _drawn()

    def surprise(self) -> bool:
        """Return whether a pass has drawn from torch's generators that was to draw from none."""
        return not self.is_on and self.have_moved(self._begins)

    def have_moved(self, before: list[torch.Tensor]) -> bool:
        """Return whether torch's generators have drawn since they had such states."""
        return not all(map(torch.equal, before, self.states()))

    def states(self) -> list[torch.Tensor]:
        """Return the states of torch's generators."""
        own = self._kind.random_state(self._device) if self._has_own else None
        return [torch.get_rng_state(), *([] if own is None else [own])]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give the streams of torch's generators back after a ``with``."""
        state, *own = self.states()
        try:
            yield
        finally:
            torch.set_rng_state(state)
            for each in own:
                self._kind.set_random_state(self._device, each)

    def _seed(self, seed: int, generators: frozenset[str]) -> None:
        seed_generators(seed, generators)
        if self._has_own:
            self._kind.module.manual_seed(seed)


def _drawn() -> int:
    return int(torch.randint(_NUMBERS, (), device="cpu"))
