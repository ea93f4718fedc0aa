"""Codecs, which encode a flat tensor of floats in fewer bytes, and a mean over the ranks that sends their codes.

`encode` returns whether all numbers were finite. A number that was not is decoded as NaN, together with its block, and
never as a number that looks right.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol

import torch

from distwrap.comm.base import Averager, Bucket, Link
from distwrap.devices.kinds import widest

_PIECE = 1 << 17  # numbers at a time on the CPU: half a megabyte fits into the cache
_MAGIC = 1.5 * 2**23  # float32 rounds a number below 2^22 added to this, and has it in the lowest bits
_FAR = 2**20  # most steps from zero to the grid for a grid that contains zero
_TINY = 1e-36  # the scale of a smaller range would overflow


class Codec(Protocol):
    """Encoding of floats in fewer bytes."""

    def size(self, count: int) -> int:
        """Return the number of bytes for `count` numbers, a multiple of 4."""

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> bool:
        """Encode flat float32 numbers as bytes, and return whether all were finite."""

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        """Decode bytes into a flat float32 tensor."""


class Cast:
    """Codec that rounds numbers to a smaller floating-point type.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``, or ``torch.float32`` for no loss.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def size(self, count: int) -> int:
        return _aligned(count * self._dtype.itemsize)

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> bool:
        if not values.numel():
            return True
        codes[: values.numel() * self._dtype.itemsize].view(self._dtype).copy_(values)
        low, high = values.aminmax()
        return bool(torch.maximum(-low, high) <= torch.finfo(self._dtype).max)

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(codes[: values.numel() * self._dtype.itemsize].view(self._dtype))


class MinMax8:
    """Codec of one byte a number: its distance from the block's minimum in steps, rounded.

    A step is 1/254 of the block's range, so the error is at most 1/508 of the range, and float32's rounding. The header
    of a block has two float32: the value of code 0, and the step. This is Bagua's MinMaxUInt8 codec without three
    defects: its absolute scale (1e-7) loses small gradients, it loses a narrow range far from zero, and its header has
    the type of the numbers.

    Source: https://arxiv.org/abs/2107.01499, section 3.
    """

    def size(self, count: int) -> int:
        return _aligned(8 * _blocks(count, _PIECE) + count)

    def _split(self, codes: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the headers (offset and step of each block), and the codes of the numbers."""
        header = 8 * _blocks(count, _PIECE)
        return codes[:header].view(torch.float32).view(header // 8, 2), codes[header : header + count]

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> bool:
        if values.device.type == "cpu":
            return self._encode_by_piece(values, codes)
        return self._encode_by_row(values, codes)

    def _encode_by_piece(self, values: torch.Tensor, codes: torch.Tensor) -> bool:
        """Encode block by block, so that the memory is read once: a block stays in the cache for all passes."""
        finite, found = True, []
        headers, steps = self._split(codes, values.numel())
        scratch = torch.empty(min(values.numel(), _PIECE))
        for start in range(0, values.numel(), _PIECE):
            block = values[start : start + _PIECE]
            shifted = scratch[: block.numel()]
            low, high = (bound.item() for bound in block.aminmax())
            offset, step, scale = _grid(low, high)
            if scale and abs(offset) * scale <= _FAR:
                lowest = round(offset * scale)  # a grid with 0: one pass shifts, scales and rounds
                offset = lowest * step
                torch.add(_scalar(_MAGIC - lowest), block, alpha=scale, out=shifted)
            else:
                torch.sub(block, offset, out=shifted).mul_(scale).add_(_MAGIC)
            steps[start : start + _PIECE].copy_(shifted.view(torch.int32))
            finite = finite and offset == offset
            found.append((offset, step))
        headers.copy_(torch.tensor(found).view(-1, 2))
        return finite

    def _encode_by_row(self, values: torch.Tensor, codes: torch.Tensor) -> bool:
        """Encode all blocks at once, and wait for the device only at the end."""
        headers, steps = self._split(codes, values.numel())
        for first, rows, place in _rows(values, _PIECE):
            low, high = (bound.to(widest(rows.device)) for bound in rows.aminmax(dim=1))
            extent = high - low
            bad = ~torch.isfinite(extent)
            step = torch.where(bad | (extent < _TINY), 0.0, extent / 254)
            scale = torch.where(step > 0, 254 / extent, 0.0)
            lowest = (low * scale).round()
            through_zero = (scale > 0) & ((low * scale).abs() <= _FAR)
            offset = torch.where(through_zero, lowest * step, torch.where(bad, torch.nan, low))
            headers[first : first + len(rows), 0] = offset
            headers[first : first + len(rows), 1] = step
            begin = torch.where(through_zero, _MAGIC - lowest, _MAGIC).float()
            shifted = rows - torch.where(through_zero, 0.0, offset).float()[:, None]
            shifted = torch.addcmul(begin[:, None], shifted, scale.float()[:, None])
            steps[place : place + rows.numel()].view(rows.shape).copy_(shifted.view(torch.int32))
        return bool(torch.isfinite(headers).all())

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        if values.device.type != "cpu":
            self._decode_by_row(codes, values)
            return
        headers, steps = self._split(codes, values.numel())
        for (offset, step), start in zip(headers.tolist(), range(0, values.numel(), _PIECE), strict=True):
            block = values[start : start + _PIECE]
            block.copy_(steps[start : start + _PIECE])
            torch.add(_scalar(offset), block, alpha=step, out=block)

    def _decode_by_row(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        headers, steps = self._split(codes, values.numel())
        for first, rows, place in _rows(values, _PIECE):
            rows.copy_(steps[place : place + rows.numel()].view(rows.shape))
            offset, step = headers[first : first + len(rows)].unbind(1)
            torch.addcmul(offset[:, None], rows, step[:, None], out=rows)


class Sign:
    """Codec of one bit a number: its sign, decoded as the mean absolute value of its block of 4096.

    Needs error feedback. Source: https://arxiv.org/abs/2102.02888, section 4.
    """

    block = 4096

    def size(self, count: int) -> int:
        return _aligned(4 * _blocks(count, self.block) + -(-count // 8))

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> bool:
        header = 4 * _blocks(values.numel(), self.block)
        scales = codes[:header].view(torch.float32)
        for first, rows, place in _rows(values, self.block):
            scales[first : first + len(rows)] = rows.abs().mean(dim=1)
            bits = (rows >= 0).view(-1)
            if len(bits) % 8:
                bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8))
            # This product collects eight bytes of 0 or 1 as the eight bits of its highest byte.
            packed = bits.view(torch.int64).mul(0x0102040810204080).view(torch.uint8)[7::8]
            codes[header + place // 8 :][: len(packed)].copy_(packed)
        return bool(torch.isfinite(scales).all())

    def decode(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        header = 4 * _blocks(values.numel(), self.block)
        scales = codes[:header].view(torch.float32)
        signs = _signs(values.device)
        for first, rows, place in _rows(values, self.block):
            packed = codes[header + place // 8 :][: -(-rows.numel() // 8)]
            plain = signs.index_select(0, packed.int()).view(-1)[: rows.numel()].view(rows.shape)
            torch.mul(plain, scales[first : first + len(rows), None], out=rows)


def _signs(device: torch.device) -> torch.Tensor:
    """Return the eight signs of each byte, +1 or -1, from the first bit to the last."""
    shifts = torch.arange(8, device=device)
    bits = torch.arange(256, device=device)[:, None].bitwise_right_shift(shifts).bitwise_and(1)
    return bits.float().mul_(2).sub_(1)


def _grid(low: float, high: float) -> tuple[float, float, float]:
    """Return the offset of a block, the step and its inverse, from the least and greatest number."""
    extent = high - low
    if not extent < float("inf"):
        return float("nan"), 0.0, 0.0
    if extent < _TINY:
        return low, 0.0, 0.0
    return low, extent / 254, 254 / extent


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


def _rows(values: torch.Tensor, block: int) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield full blocks as rows, then the last one, each with the index of its first block and number."""
    full = values.numel() // block
    at_once = full if values.device.type != "cpu" else max(1, _PIECE // block)
    for first in range(0, full, max(1, at_once)):
        count = min(at_once, full - first)
        yield first, values[first * block : (first + count) * block].view(count, block), first * block
    if values.numel() > full * block:
        yield full, values[full * block :].view(1, -1), full * block


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

    Each rank sends 2(n-1)/n of the bytes of the codes, as in a ring all-reduce. It decodes the codes of its own part
    too, so all ranks get the same bits.

    Source: https://arxiv.org/abs/2107.01499, section 3 (the centralised primitive with low precision).

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
