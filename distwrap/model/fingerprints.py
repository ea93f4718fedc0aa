"""A number that tells two tensors apart by their bits, cheap enough for all weights of a model, on any device."""

import torch

from distwrap.seeding import mix

_CHUNK = 2**13  # numbers of 64 bits, for which memory is at hand: larger pieces would be asked of the system
_ROWS = 1024  # of so many at once, on a device that is quicker with more
_MASK = 2**63 - 1

_multipliers: dict[torch.device, torch.Tensor] = {}


def fingerprint(tensor: torch.Tensor) -> int:
    """Hash a tensor's bits, shape and type into 63 bits.

    Example:
        >>> fingerprint(torch.ones(3)) == fingerprint(torch.ones(3))
        True
        >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
        False
    """
    return with_type(int(fold(tensor)), tensor)


def with_type(folded: int, tensor: torch.Tensor) -> int:
    """Mix a tensor's shape and type into what `fold` has made of its bits."""
    return (folded * 6364136223846793005 + mix(str(tensor.dtype), *tensor.shape)) & _MASK


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Hash a tensor's bits into 64 of them, on its device and without waiting for it.

    A sum of products modulo 2**64 with fixed odd multipliers, chunk by chunk, and the same over the chunks' sums
    (multilinear hashing: Lemire and Kaser, https://arxiv.org/abs/1202.4961). It tells differing tensors apart, and is
    no defence against a forger.

    Returns:
        A scalar, int64.
    """
    with torch.no_grad():
        data = tensor.int_repr() if tensor.is_quantized else tensor.detach()  # of which torch gives no view as bytes
        data = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = data.view(torch.uint8) if data.numel() else data.to(torch.uint8)
        words = raw.numel() // 8
        rest = raw.new_zeros(8)
        rest[: raw.numel() - 8 * words] = raw[8 * words :]
        if raw.data_ptr() % 8:
            raw = raw.clone()
        return _sum(raw[: 8 * words].view(torch.int64), rest.view(torch.int64))


def _sum(words: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    factors = _factors(words.device)
    whole = words.numel() // _CHUNK * _CHUNK
    blocks = words[:whole].view(-1, _CHUNK).split(1 if words.device.type == "cpu" else _ROWS)  # type: ignore[no-untyped-call]
    sums = torch.cat([_products(block, factors) for block in (*blocks, words[whole:].view(1, -1))])
    return _sum(sums, rest) if len(sums) > 1 else sums[0] * factors[0] + _products(rest.view(1, -1), factors)[0]


def _products(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    # Folded first: of round numbers only the high bits differ, and a product keeps the low ones.
    return (rows >> 32).bitwise_xor_(rows).mul_(factors[: rows.shape[1]]).sum(1)


def _factors(device: torch.device) -> torch.Tensor:
    if device not in _multipliers:
        generator = torch.Generator().manual_seed(20240229)
        factors = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator, device="cpu")
        _multipliers[device] = (2 * factors + 1).to(device)
    return _multipliers[device]
