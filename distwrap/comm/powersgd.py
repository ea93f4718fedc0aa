"""Send gradients as products of two thin matrices.

Source: https://arxiv.org/abs/1905.13727, algorithms 1 and 2, with warm start. torch's own hook starts a collective in
the callback of another one, which hangs on gloo with several buckets. Here the model's thread runs them in one order.
"""

from dataclasses import dataclass

import torch

from distwrap.checks import whole
from distwrap.comm.base import Averager, Bucket, option
from distwrap.comm.gradients import GradientAlgorithm
from distwrap.comm.link import Link
from distwrap.comm.residuals import Residuals


@dataclass(frozen=True, kw_only=True)
class PowerSGD(GradientAlgorithm):
    """Mean of low-rank approximations of the gradients, with error feedback.

    A matrix of n·m gradients is sent as (n + m)·rank numbers if these are less than half; vectors are sent whole.

    Args:
        rank: the rank of the approximation.
        seed: the seed of the first guess, the same on every rank.
    """

    rank: int = option(4, whole(1))
    seed: int = 0

    def averager(self, link: Link, device: torch.device) -> Averager:
        return LowRankMean(link, self.rank, self.seed)


class LowRankMean(Averager):
    """Averager of low-rank approximations: one all-reduce for vectors and left factors, one for right factors."""

    wants_scale = True

    def __init__(self, link: Link, rank: int, seed: int) -> None:
        self._link, self._rank = link, rank
        self._random = torch.Generator().manual_seed(seed)
        self._residuals = Residuals()
        self._right: dict[int, torch.Tensor] = {}  # by parameter: right factors of the last step, to start the next

    def average(self, bucket: Bucket) -> None:
        if self._link.size == 1 or not bucket.values.numel():
            return
        x, residual = bucket.values.float(), self._residuals.of(bucket)
        x.add_(residual)
        matrices, vectors, errors, rights = [], [], [], []
        for parameter, part, error in zip(bucket.parameters, bucket.parts(x), bucket.parts(residual), strict=True):
            rank = self._rank_for(parameter.shape)
            if rank:
                matrices.append(part.view(len(parameter), -1))
                errors.append(error.view(len(parameter), -1))
                rights.append(self._right_of(parameter, rank, x.device))
            else:
                vectors.append(part)
        lefts = self._averaged([*vectors, *(m @ right for m, right in zip(matrices, rights, strict=True))])
        for vector, mean in zip(vectors, lefts, strict=False):
            vector.copy_(mean)
        lefts = lefts[len(vectors) :]
        finite = all(bool(torch.isfinite(left).all()) for left in (*lefts, *vectors))
        if not finite:
            bucket.complain()
        lefts = [torch.linalg.qr(left).Q if finite else torch.full_like(left, torch.nan) for left in lefts]
        own = [m.T @ left for m, left in zip(matrices, lefts, strict=True)]
        if finite:
            residual.zero_()
            for m, left, right, error in zip(matrices, lefts, own, errors, strict=True):
                torch.sub(m, left @ right.T, out=error)
        means = self._averaged(own)
        for m, left, right, previous in zip(matrices, lefts, means, rights, strict=True):
            torch.matmul(left, right.T, out=m)
            if finite:
                previous.copy_(right)
        bucket.values.copy_(x)

    def _rank_for(self, shape: torch.Size) -> int:
        if len(shape) < 2 or not shape.numel():
            return 0
        rows, columns = shape[0], shape.numel() // shape[0]
        rank = min(self._rank, rows, columns)
        return rank if 2 * rank * (rows + columns) < rows * columns else 0

    def _right_of(self, parameter: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
        if id(parameter) not in self._right:
            columns = parameter.numel() // len(parameter)
            self._right[id(parameter)] = torch.randn(columns, rank, generator=self._random).to(device)
        return self._right[id(parameter)]

    def _averaged(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Average tensors over the ranks in one all-reduce."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._link.mean(flat)
        sizes = [tensor.numel() for tensor in tensors]
        return [part.view(t.shape) for part, t in zip(torch.split(flat, sizes), tensors, strict=True)]
