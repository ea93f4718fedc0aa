"""Gradients averaged in full, as DDP does it, or rounded to 16 or 8 bits on the way."""

from dataclasses import dataclass

import torch

from distwrap.comm import Averager, Bucket, GradientAlgorithm, Link
from distwrap.comm.codecs import Cast, MinMax8
from distwrap.comm.compressed import CompressedMean


class AllReduce(GradientAlgorithm):
    """The mean of the gradients, to the bit that of DDP."""

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _Mean(link)


class _Mean(Averager):
    def __init__(self, link: Link) -> None:
        self._link = link

    def average(self, bucket: Bucket) -> None:
        self._link.mean(bucket.values)


class FP16(GradientAlgorithm):
    """The mean of gradients that were rounded to float16: half the bytes. Added up in float32, so no sum overflows.

    A gradient beyond 65504 does; under precision fp16 that is what a step is skipped for, else it is reported.
    """

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, Cast(torch.float16))


class BF16(GradientAlgorithm):
    """The mean of gradients that were rounded to bfloat16: half the bytes, float32's range, three digits."""

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, Cast(torch.bfloat16))


@dataclass(frozen=True, kw_only=True)
class ByteGrad(GradientAlgorithm):
    """The mean of gradients in 8 bits: a quarter of the bytes.

    Bagua's ``ByteGradAlgorithm`` with another codec. Rounded twice, each time by at most 1/508 of the range of a
    block of 131072. All ranks get the same bits.

    Source: https://arxiv.org/abs/2107.01499, section 3.

    Args:
        error_feedback: add what was rounded off to the next step's gradients; costs one copy of them.
    """

    error_feedback: bool = False

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, MinMax8(), feedback=self.error_feedback)
