"""An algorithm of another package."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distwrap.comm.base import Averager, Bucket, Link
from distwrap.comm.gradients import GradientAlgorithm


@dataclass(frozen=True, kw_only=True)
class Clamped(GradientAlgorithm):
    """Mean of gradients that are held to a limit first."""

    limit: float = 1.0

    def averager(self, link: Link, device: torch.device) -> Averager:
        return ClampedMean(link, self.limit)


class ClampedMean(Averager):
    """What averages, for one model."""

    def __init__(self, link: Link, limit: float) -> None:
        self._link, self._limit = link, limit

    def average(self, bucket: Bucket) -> None:
        bucket.values.clamp_(-self._limit, self._limit)
        self._link.mean(bucket.values)
