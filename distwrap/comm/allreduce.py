"""Gradients averaged in full, as DDP does it, or rounded to 16 bits on the way."""

from dataclasses import dataclass

import torch

from distwrap.comm.base import Averager, Bucket
from distwrap.comm.codecs import Cast
from distwrap.comm.compressed import CompressedMean
from distwrap.comm.gradients import GradientAlgorithm
from distwrap.comm.link import Link


@dataclass(frozen=True, kw_only=True)
class AllReduce(GradientAlgorithm):
    """The mean of the gradients, to the bit that of DDP."""

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _Mean(link)


class _Mean(Averager):
    def __init__(self, link: Link) -> None:
        self._link = link

    def average(self, bucket: Bucket) -> None:
        self._link.mean(bucket.values)


@dataclass(frozen=True, kw_only=True)
class FP16(GradientAlgorithm):
    """The mean of gradients that were rounded to float16: half the bytes. Added up in float32, so no sum overflows.

    A gradient beyond 65504 does; under precision fp16 that is what a step is skipped for, else it is reported.
    """

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, Cast(torch.float16))


@dataclass(frozen=True, kw_only=True)
class BF16(GradientAlgorithm):
    """The mean of gradients that were rounded to bfloat16: half the bytes, float32's range, three digits."""

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, Cast(torch.bfloat16))
