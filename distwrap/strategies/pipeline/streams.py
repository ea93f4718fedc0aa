"""Random numbers of a model in stages: the same on all stages outside of blocks, and different in each block."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distwrap.devices.kinds import kind_of
from distwrap.seeding import mix, preserved, seed_generators


class Streams:
    """Random numbers of the passes through a model.

    All stages run the code before and between the blocks, and may use numbers that another stage draws there. So each
    microbatch has seeds of its own, which are the same on all stages: one for each block, and one for the code before
    each block. They follow from the state of torch's generator, which is equal on the ranks of a pipeline. After a pass
    the generators are as before; if any stage has drawn, they then go on by one number on all of them.

    Args:
        device: the device of the model.

    Attributes:
        draws: whether this rank has drawn in the last pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, kind_of(device)
        self._has_own = self._kind.random_state(device) is not None
        self._number = self._microbatch = self._gap = 0
        self._begins: list[torch.Tensor] = []
        self._outside: dict[tuple[int, int], int] = {}
        self.draws = False

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Restore the generators after a pass."""
        self._number, self.draws, self._outside = hash(tuple(_words(torch.get_rng_state()))), False, {}
        states = self._states()
        with preserved():
            try:
                yield
            finally:
                self._restore(states)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Let a run that is no part of the pass draw, and forget it."""
        kept = self._outside, self.draws
        self._outside = {}
        try:
            yield
        finally:
            self._outside, self.draws = kept

    @contextmanager
    def of_microbatch(self, number: int) -> Iterator[None]:
        """Begin a microbatch with seeds of its own, and note whether it draws."""
        self._microbatch = number
        seed_generators(mix("microbatch", self._number, number))
        others = _others()
        self._begin_gap(0)
        try:
            yield
        finally:
            self._end_gap()
            self.draws |= _others() != others

    @contextmanager
    def of_block(self, block: int) -> Iterator[None]:
        """Let a block draw from its own stream of torch's generators."""
        self._end_gap()
        with self.recomputed():
            before = self._states()
            try:
                yield
            finally:
                self.draws |= self._have_moved(before)
        self._begin_gap(block + 1)

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """Let a block draw as in its forward, before which torch's generators were as they are now."""
        states = self._states()
        self._seed_torch("block", hash(tuple(_words(states[0]))))
        try:
            yield
        finally:
            self._restore(states)

    def outside(self, gaps: int) -> list[float]:
        """Return a number for the draws before each block, in all microbatches, and after the last; 0 for no draw."""
        found = [[value for key, value in self._outside.items() if key[0] == gap] for gap in range(gaps)]
        return [float(sum(values) % 2**50) for values in found]

    def _begin_gap(self, gap: int) -> None:
        self._gap = gap
        self._seed_torch("gap", self._number, self._microbatch, gap)
        self._begins = self._states()

    def _end_gap(self) -> None:
        if self._have_moved(self._begins):
            self.draws = True
            words = [word for state in self._states() for word in _words(state)]
            self._outside[self._gap, self._microbatch] = hash(tuple(words))

    @staticmethod
    def go_on() -> None:
        """Advance torch's generator, so that the next pass draws other numbers."""
        torch.randint(2, (), device="cpu")

    def _states(self) -> list[torch.Tensor]:
        own = self._kind.random_state(self._device) if self._has_own else None
        return [torch.get_rng_state(), *([] if own is None else [own])]

    def _have_moved(self, before: list[torch.Tensor]) -> bool:
        return not all(map(torch.equal, before, self._states()))

    def _restore(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for each in states[1:]:
            self._kind.set_random_state(self._device, each)

    def _seed_torch(self, *parts: int | str) -> None:
        seed = mix(*parts)
        torch.default_generator.manual_seed(seed)
        if self._has_own:
            self._kind.module.manual_seed(seed)


def _words(state: torch.Tensor) -> list[int]:
    return state.cpu().view(torch.int64).tolist()


def _others() -> Any:
    """Return the positions of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state()[2:] if numpy is not None else None
