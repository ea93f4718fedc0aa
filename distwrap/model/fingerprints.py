"""A number that tells two tensors apart by their bits, cheap enough for all weights of a model, on any device."""

import torch

from distwrap.seeding import mix

_CHUNK = 2**17  # numbers of 64 bits: what fits into a cache
_MASK = 2**63 - 1

_multipliers: dict[torch.device, torch.Tensor] = {}


def fingerprint(tensor: torch.Tensor) -> int:
    """Hash a tensor's bits, shape and type into 63 bits.

    A sum of products modulo 2**64 with fixed odd multipliers, chunk by chunk (multilinear hashing: Lemire and Kaser,
    https://arxiv.org/abs/1202.4961). It tells differing tensors apart, and is no defence against a forger.

    Example:
        >>> fingerprint(torch.ones(3)) == fingerprint(torch.ones(3))
        True
        >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
        False
    """
    with torch.no_grad():
        data = tensor.int_repr() if tensor.is_quantized else tensor.detach()  # of which torch gives no view as bytes
        data = data.contiguous().reshape(-1)
        raw = data.view(torch.uint8) if data.numel() else data.to(torch.uint8)
        whole = raw.numel() // 8 * 8
        rest = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        rest[: raw.numel() - whole] = raw[whole:]
        if raw[:whole].data_ptr() % 8:
            raw = raw.clone()
        factors = _factors(raw.device)
        total = mix(str(tensor.dtype), *tensor.shape)
        for number, chunk in enumerate((*torch.split(raw[:whole].view(torch.int64), _CHUNK), rest.view(torch.int64))):
            # Folded first: of round numbers only the high bits differ, and a product keeps the low ones.
            part = int(((chunk ^ (chunk >> 32)) * factors[: chunk.numel()]).sum())
            total = (total * 6364136223846793005 + part + number) & (2**64 - 1)
    return total & _MASK


def _factors(device: torch.device) -> torch.Tensor:
    if device not in _multipliers:
        generator = torch.Generator().manual_seed(20240229)
        factors = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator)
        _multipliers[device] = (2 * factors + 1).to(device)
    return _multipliers[device]
