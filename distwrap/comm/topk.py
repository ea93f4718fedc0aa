"""Average only the largest gradients.

Source: https://arxiv.org/abs/1809.07599 (sparsified SGD with memory).
"""

import math
from dataclasses import dataclass

import torch

from distwrap.checks import fraction
from distwrap.comm.base import Averager, Bucket, option
from distwrap.comm.gradients import GradientAlgorithm
from distwrap.comm.link import Link
from distwrap.comm.residuals import Residuals


@dataclass(frozen=True, kw_only=True)
class TopK(GradientAlgorithm):
    """Mean of the largest gradients of each rank. Others are added up until they are among the largest.

    Each rank sends 8 bytes for each chosen gradient to every other rank, so the traffic grows with the number of ranks.

    Args:
        ratio: the part of a bucket to send, above 0 and at most 1.
    """

    ratio: float = option(0.01, fraction())

    def averager(self, link: Link, device: torch.device) -> Averager:
        return LargestMean(link, self.ratio)


class LargestMean(Averager):
    """Averager of the largest gradients, with one all-gather of indices and values a bucket."""

    wants_scale = True

    def __init__(self, link: Link, ratio: float) -> None:
        self._link, self._ratio, self._residuals = link, ratio, Residuals()

    def average(self, bucket: Bucket) -> None:
        link = self._link
        if link.size == 1 or not bucket.values.numel():
            return
        x, residual = bucket.values.float(), self._residuals.of(bucket)
        x.add_(residual)
        count = math.ceil(self._ratio * x.numel())
        places = x.abs().topk(count, sorted=False).indices
        chosen = x[places]
        if torch.isfinite(chosen).all():
            residual.copy_(x)
            residual[places] = 0.0
        else:
            bucket.complain()  # the residual keeps nothing of this step
        own = torch.stack([places.int(), chosen.view(torch.int32)])
        everyones = torch.empty(2 * link.size, count, dtype=torch.int32, device=x.device)
        link.all_gather(everyones, own)
        x.zero_()
        for theirs, values in everyones.view(link.size, 2, count):  # in rank order, so the same bits on all
            x.index_add_(0, theirs, values.view(torch.float32), alpha=1.0 / link.size)
        bucket.values.copy_(x)
