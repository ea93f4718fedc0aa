"""Error feedback: add the compression error of one step to the numbers that the rank sends in the next.

Source: https://arxiv.org/abs/1901.09847, algorithm 2.
"""

import torch

from distwrap.comm.base import Bucket


class Residuals:
    """Errors, one float32 a gradient, kept by parameter, since DDP rearranges buckets after the first step."""

    def __init__(self) -> None:
        self._flat: dict[tuple[int, ...], torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}
        self._scales: dict[tuple[int, ...], float] = {}

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return the flat errors of a bucket, in the scale of its gradients, to change in place."""
        key = bucket.key
        if key not in self._flat:
            self._rearrange(bucket)
        flat = self._flat[key]
        if self._scales[key] != bucket.scale:
            flat.mul_(bucket.scale / self._scales[key])
            self._scales[key] = bucket.scale
        return flat

    def _rearrange(self, bucket: Bucket) -> None:
        flat = torch.zeros(bucket.values.numel(), device=bucket.values.device)
        parameters = set(bucket.key)
        for parameter, part in zip(bucket.parameters, bucket.parts(flat), strict=True):
            if id(parameter) in self._parts:
                part.copy_(self._parts[id(parameter)])
            self._parts[id(parameter)] = part
        # All buckets of a step have the same scale, so that of any old bucket is right.
        scale = next((self._scales[old] for old in self._flat if parameters.intersection(old)), bucket.scale)
        for old in [old for old in self._flat if parameters.issuperset(old)]:
            del self._flat[old], self._scales[old]
        self._flat[bucket.key], self._scales[bucket.key] = flat, scale
