"""Many steps on one's own, then a mean.

Source: https://arxiv.org/abs/1805.09767, algorithm 1; with a warm-up, post-local SGD, https://arxiv.org/abs/1808.07217.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distwrap.checks import whole
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange
from distwrap.group.world import World

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel


@dataclass(frozen=True, kw_only=True)
class LocalSGD(WeightAlgorithm):
    """Average the weights every `sync_every` optimizer steps, with any optimizer; its state stays each rank's own."""

    sync_every: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(1)("sync_every", self.sync_every)

    def attach(self, model: DistributedModel, world: World) -> _LocalSGD:
        return _LocalSGD(self, model, world)


class _LocalSGD(WeightExchange[LocalSGD]):
    def after_step(self, step: int) -> None:
        if step % self.algorithm.sync_every == 0:
            weights = self.weights.read()
            self.engine.call(partial(self.among_replicas, Link.mean, weights))
            self.weights.write(weights)
            self.alike = True
