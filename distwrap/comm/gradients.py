"""Algorithms that exchange gradients: DDP submits its buckets in a backward, and the model's thread averages them.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer

from distwrap.checks import fraction, whole
from distwrap.comm.base import Algorithm, Averager, Bucket, Link, option
from distwrap.comm.compressed import Cast, CompressedMean, MinMax8, Residuals
from distwrap.comm.exchange import Exchange
from distwrap.group.world import World
from distwrap.model.distributed import DistributedModel
from distwrap.precision import LossScaling


class GradientAlgorithm(Algorithm):
    """Algorithm in which ranks average gradients, all or some, and hold the same weights."""

    @abstractmethod
    def averager(self, link: Link, device: torch.device) -> Averager:
        """Return a new averager for one model."""

    def prepare_optimizer(self, optimizer: Optimizer, averager: Averager | None) -> Optimizer:
        """Return the optimizer for the loop to step; `averager` is ``None`` on all but the first rank of a node."""
        return optimizer

    def attach(self, model: DistributedModel, world: World) -> GradientExchange:
        return GradientExchange(self, model, world)


class GradientExchange(Exchange[GradientAlgorithm]):
    """Exchange of one model's gradients."""

    def __init__(self, algorithm: GradientAlgorithm, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._averager = None if self.link is None else algorithm.averager(self.link, world.device)
        self._scaling = world.part(LossScaling)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self.algorithm.prepare_optimizer(optimizer, self._averager)

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        values, scaler = bucket.buffer(), self._scaling.scaler if self._scaling.in_backward else None
        item = Bucket(values, cast("list[nn.Parameter]", bucket.parameters()), bucket.gradients(), name_of=self._names)
        if scaler is None:
            item.report = self.report  # fp16 skips such steps, so they are not reported
        elif self._averager is not None and self._averager.wants_scale:
            item.scale = scaler.get_scale()
        return self.engine.submit(partial(self._average, item), otherwise=values)

    def _average(self, bucket: Bucket) -> torch.Tensor:
        values = bucket.values
        if self.node is not None:
            self.node.to_first(values)
            values.mul_(self.nnodes / self.world_size)
        if self.link is not None and any(parameter.is_complex() for parameter in bucket.parameters[:1]):
            self.link.mean(values)  # uncompressed, since DDP's views of complex numbers are real
        elif self._averager is not None:
            self._averager.average(bucket)
        if self.node is not None:
            self.node.from_first(values)
        return values


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


@dataclass(frozen=True, kw_only=True)
class PowerSGD(GradientAlgorithm):
    """Mean of low-rank approximations of the gradients, with error feedback.

    Source: https://arxiv.org/abs/1905.13727, algorithms 1 and 2, with warm start. torch's own hook starts a collective
    in the callback of another one, which hangs on gloo with several buckets.

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


@dataclass(frozen=True, kw_only=True)
class TopK(GradientAlgorithm):
    """Mean of the largest gradients of each rank. Others are added up until they are among the largest.

    Source: https://arxiv.org/abs/1809.07599 (sparsified SGD with memory).

    Each rank sends 8 bytes for each chosen gradient to every other rank, so the traffic grows with the number of ranks.

    Args:
        ratio: the part of a bucket to send, above 0 and at most 1.
    """

    ratio: float = option(0.01, fraction())

    def averager(self, link: Link, device: torch.device) -> Averager:
        return LargestMean(link, self.ratio)


class LargestMean(Averager):
    """Averager of the largest gradients, with one all-gather of indices and values a bucket."""

    wants_scale = True

    def __init__(self, link: Link, ratio: float) -> None:
        self._link, self._ratio, self._residuals = link, ratio, Residuals()

    def average(self, bucket: Bucket) -> None:
        link = self._link
        if link.size == 1 or not bucket.values.numel():
            return
        x, residual = bucket.values.float(), self._residuals.of(bucket)
        x.add_(residual)
        count = math.ceil(self._ratio * x.numel())
        places = x.abs().topk(count, sorted=False).indices
        chosen = x[places]
        if torch.isfinite(chosen).all():
            residual.copy_(x)
            residual[places] = 0.0
        else:
            bucket.complain()  # the residual keeps nothing of this step
        own = torch.stack([places.int(), chosen.view(torch.int32)])
        everyones = torch.empty(2 * link.size, count, dtype=torch.int32, device=x.device)
        link.all_gather(everyones, own)
        x.zero_()
        for theirs, values in everyones.view(link.size, 2, count):  # in rank order, so the same bits on all
            x.index_add_(0, theirs, values.view(torch.float32), alpha=1.0 / link.size)
        bucket.values.copy_(x)
