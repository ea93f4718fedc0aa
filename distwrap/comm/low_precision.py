"""Weights averaged with two neighbours on a ring, of which only quantised differences travel.

Source: https://arxiv.org/abs/1803.06443 (difference compression); Bagua's ``LowPrecisionDecentralizedAlgorithm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from distwrap.checks import whole
from distwrap.comm.codecs import MinMax8
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange
from distwrap.group.world import World

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(WeightAlgorithm):
    """After a step, each rank's weights are a third of its own and of both neighbours', plus its own progress.

    Sends two bytes a weight, whatever the number of ranks; keeps three copies of the weights.

    Args:
        communication_interval: optimizer steps between two exchanges.
    """

    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(1)("communication_interval", self.communication_interval)

    def attach(self, model: DistributedModel, world: World) -> _Ring:
        return _Ring(self, model, world)


class _Ring(WeightExchange[LowPrecisionDecentralized]):
    """Holds what this rank's neighbours know of it, and what it knows of them: exactly the same numbers."""

    def __init__(self, algorithm: LowPrecisionDecentralized, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        self._known: list[torch.Tensor] = []  # own, left, right

    def begin(self) -> None:
        self._known = [self.weights.read() for _ in range(3)]

    def brought_together(self) -> None:
        if self._known:
            self.begin()

    def after_step(self, step: int) -> None:
        if step % self.algorithm.communication_interval == 0:
            weights = self.weights.read()
            self.engine.call(lambda: self.among_replicas(self._exchange, weights))
            self.weights.write(weights)

    def _exchange(self, link: Link, weights: torch.Tensor) -> None:
        if link.size == 1:
            return
        own, left, right = self._known
        codec = MinMax8()
        difference = (weights + (left + right) / 3 - own * (5 / 3)).float()
        codes = [torch.empty(codec.size(len(weights)), dtype=torch.uint8, device=weights.device) for _ in range(3)]
        if not codec.encode(difference, codes[0]):
            self.report(["a weight"])
        before, after = (link.rank - 1) % link.size, (link.rank + 1) % link.size
        if before == after:
            link.swap({after: codes[0]}, {before: codes[1]})
            codes[2] = codes[1]
        else:
            link.swap({before: codes[0], after: codes[0]}, {before: codes[1], after: codes[2]})
        for known, code in zip(self._known, codes, strict=True):
            codec.decode(code, difference)
            known.add_(difference)
        weights.copy_(own)
