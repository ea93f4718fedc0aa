"""A mean over the ranks that sends codes: each rank adds up one part, and sends the mean's codes to all.

Each rank sends 2(n-1)/n of the bytes of the codes, as in a ring all-reduce. It decodes the codes of its own part too,
so all ranks get the same bits.

Source: https://arxiv.org/abs/2107.01499, section 3 (the centralised primitive with low precision).
"""

from itertools import pairwise
from typing import Any

import torch

from distwrap.comm.base import Averager, Bucket
from distwrap.comm.codecs import Codec
from distwrap.comm.link import Link

_AT_ONCE = 1 << 20  # numbers: while one such piece of a bucket travels, another is coded


class Residuals:
    """Compression errors of a step, one float32 a gradient, which are added to the numbers sent in the next one.

    They start at zero when DDP has rearranged its buckets, which it does after the first step.

    Source: https://arxiv.org/abs/1901.09847, algorithm 2.
    """

    def __init__(self) -> None:
        self._by_bucket: dict[tuple[int, ...], tuple[torch.Tensor, float]] = {}  # each with its scale

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return the flat errors of a bucket, in the scale of its gradients, to change in place."""
        key = bucket.key
        if key not in self._by_bucket:
            self._by_bucket = {old: each for old, each in self._by_bucket.items() if set(old).isdisjoint(key)}
            flat = torch.zeros(bucket.values.numel(), device=bucket.values.device)
            self._by_bucket[key] = flat, bucket.scale
        flat, scale = self._by_bucket[key]
        if scale != bucket.scale:
            self._by_bucket[key] = flat.mul_(bucket.scale / scale), bucket.scale
        return flat


class CompressedMean(Averager):
    """Averager that scatters codes, adds up the decoded numbers, and gathers the codes of the mean.

    Args:
        link: the ranks that average.
        codec: the codec of the numbers.
        feedback: whether to add the compression errors of a step in the next: of the numbers that a rank sends, and of
            the part that it adds up.
    """

    def __init__(self, link: Link, codec: Codec, *, feedback: bool = False) -> None:
        self._link, self._codec = link, codec
        self.wants_scale = feedback
        self._sent = Residuals() if feedback else None
        self._summed: dict[tuple[int, ...], tuple[torch.Tensor, float]] = {}

    def average(self, bucket: Bucket) -> None:
        count = bucket.values.numel()
        if self._link.size == 1 or not count:
            return
        x = bucket.values.float()  # no copy if it is float32
        residual = None if self._sent is None else self._sent.of(bucket)
        pieces = [
            _Piece(self, bucket, x[start : start + _AT_ONCE], start, residual) for start in range(0, count, _AT_ONCE)
        ]
        # A pipeline with the same order on all ranks: a piece is scattered while the one before it is gathered and the
        # one before that is decoded.
        finite = True
        for turn in range(len(pieces) + 2):
            if turn < len(pieces):
                was_finite, finite = finite, pieces[turn].scatter() and finite
                if was_finite and not finite:
                    bucket.complain()
            if 1 <= turn <= len(pieces):
                pieces[turn - 1].gather()
            if turn >= 2:
                pieces[turn - 2].decode()
        bucket.values.copy_(x)  # torch leaves a tensor alone that would be copied to itself


class _Piece:
    """Piece of a bucket that is being averaged."""

    def __init__(
        self, owner: CompressedMean, bucket: Bucket, x: torch.Tensor, start: int, residual: torch.Tensor | None
    ) -> None:
        self._owner, self._link, self._codec = owner, owner._link, owner._codec
        self._scale, self._key = bucket.scale, (start, *bucket.key)
        self._x, self._residual = x, None if residual is None else residual[start : start + x.numel()]
        part = -(-x.numel() // self._link.size)
        self._bounds = [min(x.numel(), rank * part) for rank in range(self._link.size + 1)]
        self._parts = self._cut(x)
        self._codes = torch.empty(self._link.size, self._codec.size(part), dtype=torch.uint8, device=x.device)
        self._received = torch.empty_like(self._codes)
        self._work: Any

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[low:high] for low, high in pairwise(self._bounds)]

    def scatter(self) -> bool:
        """Send each rank the codes of its part, and return whether all numbers were finite."""
        finite = True
        if self._residual is not None:
            self._x.add_(self._residual)
        for part, codes in zip(self._parts, self._codes, strict=True):
            finite = self._codec.encode(part, codes) and finite
        self._work = self._link.begin_all_to_all(self._received, self._codes)
        if self._residual is not None and finite:  # keep no error of a step that is not finite
            for part, codes in zip(self._cut(self._residual), self._codes, strict=True):
                self._codec.decode(codes, part)
            torch.sub(self._x, self._residual, out=self._residual)
        return finite

    def gather(self) -> None:
        """Add up the parts received, and send the codes of the mean to all ranks."""
        self._work.wait()
        mean = torch.zeros_like(self._parts[self._link.rank])
        term = torch.empty_like(mean)
        for codes in self._received:
            self._codec.decode(codes, term)
            mean.add_(term)
        mean.mul_(1.0 / self._link.size)
        own = torch.empty_like(self._received[0])
        self._encode_mean(mean, term, own)
        self._work = self._link.begin_all_gather(self._codes, own)

    def _encode_mean(self, mean: torch.Tensor, decoded: torch.Tensor, codes: torch.Tensor) -> None:
        if self._residual is None:
            self._codec.encode(mean, codes)
            return
        # After DDP has rearranged its buckets, this part belongs to another rank, and the error starts at zero.
        summed = self._owner._summed
        if self._key in summed:
            residual, scale = summed[self._key]
            mean.add_(residual, alpha=self._scale / scale)
        if self._codec.encode(mean, codes):
            self._codec.decode(codes, decoded)
            summed[self._key] = mean.sub_(decoded), self._scale

    def decode(self) -> None:
        """Replace the numbers by the mean."""
        self._work.wait()
        for part, codes in zip(self._parts, self._codes, strict=True):
            self._codec.decode(codes, part)
