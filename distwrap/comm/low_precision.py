"""Average weights with two neighbours on a ring, and send only quantised differences.

Source: https://arxiv.org/abs/1803.06443 (difference compression); Bagua's ``LowPrecisionDecentralizedAlgorithm``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distwrap.checks import whole
from distwrap.comm.base import option
from distwrap.comm.codecs import MinMax8
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange


class _Ring(WeightExchange["LowPrecisionDecentralized"]):
    """Exchange with copies of the weights that this rank and its neighbours know of each other."""

    _known: Sequence[torch.Tensor] = ()  # own, left, right

    def begin(self) -> None:
        self._known = [self.weights.read() for _ in range(3)]

    def brought_together(self) -> None:
        if self._known:
            self.begin()

    def after_step(self, step: int) -> None:
        if step % self.algorithm.communication_interval == 0:
            self.exchange_weights(self._exchange)

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


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(WeightAlgorithm):
    """Mean of the weights of a rank and its two neighbours after each step, plus the rank's progress.

    Each rank sends two bytes a weight, whatever the number of ranks, and keeps three copies of the weights.

    Args:
        communication_interval: optimizer steps between two exchanges.
    """

    exchange_class = _Ring
    communication_interval: int = option(1, whole(1))
