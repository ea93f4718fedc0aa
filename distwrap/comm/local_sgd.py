"""Train many steps without exchange, then average the weights.

Source: https://arxiv.org/abs/1805.09767, algorithm 1. With a warm-up it is post-local SGD,
https://arxiv.org/abs/1808.07217.
"""

from dataclasses import dataclass

from distwrap.checks import whole
from distwrap.comm.base import option
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange


class _LocalSGD(WeightExchange["LocalSGD"]):
    def after_step(self, step: int) -> None:
        if step % self.algorithm.sync_every == 0:
            self.exchange_weights(Link.mean)
            self.alike = True


@dataclass(frozen=True, kw_only=True)
class LocalSGD(WeightAlgorithm):
    """Mean of the weights every `sync_every` steps of any optimizer. Each rank keeps its optimizer state."""

    exchange_class = _LocalSGD
    sync_every: int = option(8, whole(1))
