"""Gradients averaged in one byte each.

Source: https://arxiv.org/abs/2107.01499, section 3; Bagua's ``ByteGradAlgorithm`` with another codec.
"""

from dataclasses import dataclass

import torch

from distwrap.comm.base import Averager
from distwrap.comm.codecs import MinMax8
from distwrap.comm.compressed import CompressedMean
from distwrap.comm.gradients import GradientAlgorithm
from distwrap.comm.link import Link


@dataclass(frozen=True, kw_only=True)
class ByteGrad(GradientAlgorithm):
    """The mean of gradients in 8 bits: a quarter of the bytes.

    Rounded twice, each time by at most 1/508 of the range of a block of 131072. All ranks get the same bits.

    Args:
        error_feedback: add what was rounded off to the next step's gradients; costs one copy of them.
    """

    error_feedback: bool = False

    def averager(self, link: Link, device: torch.device) -> Averager:
        return CompressedMean(link, MinMax8(), feedback=self.error_feedback)
