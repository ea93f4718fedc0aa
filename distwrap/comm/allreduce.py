"""Algorithms that average all gradients, as DDP does, or gradients rounded to 16 or 8 bits."""

from dataclasses import dataclass

import torch

from distwrap.comm.base import Averager, Bucket
from distwrap.comm.codecs import Cast, MinMax8
from distwrap.comm.compressed import CompressedMean
from distwrap.comm.gradients import GradientAlgorithm
from distwrap.comm.link import Link


class AllReduce(GradientAlgorithm):
    """Mean of the gradients, equal to DDP's to the bit."""

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _Mean(link)


class _Mean(Averager):
    def __init__(self, link: Link) -> None:
        self._link = link

    def average(self, bucket: Bucket) -> None:
        self._link.mean(bucket.values)


class FP16(GradientAlgorithm):
    """Mean of gradients rounded to float16: half the bytes. The sum is in float32, so it cannot overflow.

    A gradient beyond 65504 overflows. Under precision fp16 such a step is skipped; otherwise it is reported.
    """

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, Cast(torch.float16))


class BF16(GradientAlgorithm):
    """Mean of gradients rounded to bfloat16: half the bytes, float32's range, three digits."""

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, Cast(torch.bfloat16))


@dataclass(frozen=True, kw_only=True)
class ByteGrad(GradientAlgorithm):
    """Mean of gradients in 8 bits: a quarter of the bytes.

    Bagua's ``ByteGradAlgorithm`` with another codec. Numbers are rounded twice, each time by at most 1/508 of the range
    of a block of 131072. All ranks get the same bits.

    Source: https://arxiv.org/abs/2107.01499, section 3.

    Args:
        error_feedback: add the rounding errors to the gradients of the next step; needs memory for one copy of the
            gradients.
    """

    error_feedback: bool = False

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, MinMax8(), feedback=self.error_feedback)
