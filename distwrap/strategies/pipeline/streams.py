"""Random numbers of a model in stages: the same on all stages outside of blocks, and different in each block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from distwrap.devices.kinds import kind_of
from distwrap.seeding import GENERATORS, mix, preserved, seed_generators

_NUMBERS = 2**40  # float64 sums such numbers exactly over thousands of ranks


class Streams:
    """Random numbers of the passes through a model.

    All stages run the code before and between the blocks, and may use numbers that another stage draws there. So each
    microbatch starts with one seed on all stages, from a number of torch's generator, which is equal on the ranks of a
    pipeline. Each block draws from its own stream, seeded by the microbatch's, which then continues as if the block had
    drawn nothing. After a pass the generators are as before, except for that number.

    Args:
        device: the device of the model.

    Attributes:
        number: the number with which the last pass began.
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
        """Draw a number for a pass that uses some generators, and restore the caller's generators afterwards.

        A pass without generators draws no number.
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
        """Draw from a block's own stream, which a recomputation starts where its forward did."""
        if not (self._trains if recomputed else self.is_on):
            yield
            return
        seed = mix("block", _drawn())
        with self.kept():
            self._seed(seed, frozenset({"torch"}))
            yield

    def pass_block(self) -> None:
        """Continue as after a block that another stage computes."""
        if self.is_on:
            _drawn()

    def surprise(self) -> bool:
        """Return whether a pass has drawn from torch's generators although it was not expected to."""
        return not self.is_on and self.have_moved(self._begins)

    def have_moved(self, before: list[torch.Tensor]) -> bool:
        """Return whether torch's generators have drawn since these states."""
        return not all(map(torch.equal, before, self.states()))

    def states(self) -> list[torch.Tensor]:
        """Return the states of torch's generators."""
        own = self._kind.random_state(self._device) if self._has_own else None
        return [torch.get_rng_state(), *([] if own is None else [own])]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the states of torch's generators after a ``with``."""
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
