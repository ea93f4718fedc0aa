"""A mean over the ranks of which only small codes travel: each rank adds up one part, and all get its codes.

Sends 2(n-1)/n of the codes' bytes, as a ring all-reduce does of the numbers'. Every rank decodes the same bytes, of its
own part too, so all end with the same bits.

Source: https://arxiv.org/abs/2107.01499, section 3 (the centralised primitive with low precision).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from distwrap.comm.base import Averager, Bucket
from distwrap.comm.codecs import Codec
from distwrap.comm.link import Link
from distwrap.comm.residuals import Residuals


class CompressedMean(Averager):
    """Scatter, add up, gather, all in codes.

    Args:
        link: the ranks.
        codec: of the numbers.
        feedback: whether the error of a step is added to the next: of what a rank sends, and of the part it adds up.
    """

    def __init__(self, link: Link, codec: Codec, *, feedback: bool = False) -> None:
        self._link, self._codec = link, codec
        self.wants_scale = feedback
        self._sent = Residuals() if feedback else None
        self._summed: dict[tuple[int, ...], tuple[torch.Tensor, float]] = {}

    def average(self, bucket: Bucket) -> None:
        link, codec, count = self._link, self._codec, bucket.values.numel()
        if link.size == 1 or not count:
            return
        x = bucket.values.float()  # itself, where it is float32
        part = -(-count // link.size)
        bounds = [min(count, rank * part) for rank in range(link.size + 1)]
        parts = [x[low:high] for low, high in pairwise(bounds)]
        sent = torch.empty(link.size, codec.size(part), dtype=torch.uint8, device=x.device)
        received = torch.empty_like(sent)
        residual = None if self._sent is None else self._sent.of(bucket)
        if residual is not None:
            x.add_(residual)
        finite = True
        for piece, codes in zip(parts, sent, strict=True):
            finite = codec.encode(piece, codes) and finite
        if not finite:
            bucket.complain()
        elif residual is not None:  # of a step that is not finite nothing is kept
            for piece, codes, low in zip(parts, sent, bounds, strict=False):
                codec.decode(codes, residual[low : low + piece.numel()])
            torch.sub(x, residual, out=residual)
        link.all_to_all(received, sent)
        mine = self._mean(bucket, parts[link.rank], received)
        link.all_gather(sent, mine)
        for piece, codes in zip(parts, sent, strict=True):
            codec.decode(codes, piece)
        if x is not bucket.values:
            bucket.values.copy_(x)

    def _mean(self, bucket: Bucket, own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Decode what the ranks have sent of this rank's part, add it up, and return the mean's codes."""
        codec = self._codec
        mean, piece = torch.zeros_like(own), torch.empty_like(own)
        for codes in received:
            codec.decode(codes, piece)
            mean.add_(piece)
        mean.mul_(1.0 / len(received))
        result = torch.empty_like(received[0])
        if self._sent is None:
            codec.encode(mean, result)
            return result
        # Of a bucket that DDP rearranges after the first step, this part belongs to another rank: it begins anew.
        residual, scale = self._summed.get(bucket.key, (torch.zeros_like(mean), bucket.scale))
        mean.add_(residual, alpha=bucket.scale / scale)
        if codec.encode(mean, result):
            codec.decode(result, piece)
            self._summed[bucket.key] = mean.sub_(piece), bucket.scale
        return result
