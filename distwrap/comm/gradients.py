"""Algorithms that exchange gradients: DDP submits its buckets in a backward, and the model's thread averages them.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

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

    Source: https://arxiv.org/abs/1905.13727, algorithms 1 and 2, with warm start, by torch's hook:
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.

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
    """Averager by torch's hook, which gets one bucket at a time, and waits for it: its collectives keep their order."""

    wants_scale = True

    def __init__(self, link: Link, rank: int, seed: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook  # needs NumPy

        self._link, self._rank, self._hook = link, rank, hook
        self._random = torch.Generator().manual_seed(seed)
        self._states: dict[tuple[int, ...], tuple[Any, float]] = {}  # by bucket, with the scale of its errors

    def average(self, bucket: Bucket) -> None:
        if self._link.size == 1 or not bucket.values.numel():
            return
        if not torch.isfinite(bucket.values).all():
            bucket.complain()
        x, key = bucket.values.float(), bucket.key
        parts = zip(bucket.parameters, bucket.parts(x), strict=True)
        views = [part.view(len(each), -1) if each.dim() else part.view(1, 1) for each, part in parts if part.numel()]
        if key not in self._states:  # DDP rearranges its buckets after the first step
            self._states = {old: each for old, each in self._states.items() if set(old).isdisjoint(key)}
        state, scale = self._states.pop(key) if key in self._states else (self._begun(views), bucket.scale)
        for error in state.error_dict.values():
            error.mul_(bucket.scale / scale)
        before = state.total_numel_after_compression
        hooked: Any = _HookedBucket(x, views)
        self._hook.powerSGD_hook(state, hooked).wait()
        self._link.count_sum(4 * (state.total_numel_after_compression - before))
        if torch.isfinite(x).all():  # else nothing is kept of this step, on all ranks
            self._states[key] = state, bucket.scale
        bucket.values.copy_(x)

    def _begun(self, views: list[torch.Tensor]) -> Any:
        """Return the state of a bucket; torch's hook would seed the process's random numbers for the first factors."""
        state = self._hook.PowerSGDState(self._link.group, self._rank, start_powerSGD_iter=2)
        state.iter, rows, rights = 2, 0, [torch.empty(0)]
        for n, m in [view.shape for view in views]:
            rank = min(n, m, self._rank)
            if 2 * rank * (n + m) < n * m:  # as the hook decides it
                rows += n * rank
                rights.append(torch.randn(m, rank, generator=self._random).view(-1))
        state.p_memory_dict[0] = torch.empty(rows, device=views[0].device)
        state.q_memory_dict[0] = torch.cat(rights).to(views[0].device)
        return state


class _HookedBucket:
    """Bucket for torch's hook: its numbers, and the matrices among them."""

    def __init__(self, values: torch.Tensor, views: list[torch.Tensor]) -> None:
        self.buffer, self.gradients = (lambda: values), (lambda: views)
        self.index, self.is_last = (lambda: 0), (lambda: True)


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
