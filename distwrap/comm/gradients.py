"""Gradients of a backward: DDP hands them over bucket by bucket, the model's thread averages them in this order.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer

from distwrap._internals.torch import after_backward, current_backward
from distwrap.comm.base import Algorithm, Averager, Bucket
from distwrap.comm.exchange import Exchange
from distwrap.comm.link import Link
from distwrap.group.world import World, current_world
from distwrap.precision import LossScaling

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel


@dataclass(frozen=True, kw_only=True)
class GradientAlgorithm(Algorithm):
    """The ranks average gradients, in one way or another, and hold the same weights."""

    @abstractmethod
    def averager(self, link: Link, device: torch.device) -> Averager:
        """Make what averages, for one model."""

    def prepare_optimizer(self, optimizer: Optimizer, averager: Averager | None) -> Optimizer:
        """Return the optimizer that the loop steps; `averager` is ``None`` on a node's ranks but its first."""
        return optimizer

    def attach(self, model: DistributedModel, world: World) -> GradientExchange:
        return GradientExchange(self, model, world)


class GradientExchange(Exchange[GradientAlgorithm]):
    """A gradient algorithm at work for one model."""

    def __init__(self, algorithm: GradientAlgorithm, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._averager: Averager | None = None
        if self.link is not None:
            self._averager = algorithm.averager(self.link, world.device)
        model.register_comm_hook(self, on_bucket)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self.algorithm.prepare_optimizer(optimizer, self._averager)

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue a bucket; the future has its buffer when it holds the mean."""
        watch_failure(self, bucket)
        scaling, values = current_world().part(LossScaling), bucket.buffer()
        scaled = scaling.scaler is not None and scaling.is_scaled
        item = Bucket(values, cast("list[nn.Parameter]", bucket.parameters()), bucket.gradients(), name_of=self._names)
        item.report = None if scaled else self.report  # fp16 has such numbers now and then, and skips the step
        if scaled and self._averager is not None and self._averager.wants_scale:
            assert scaling.scaler is not None
            item.scale = scaling.scaler.get_scale()
        return self.engine.submit(partial(self._average, item), otherwise=values)

    def _average(self, bucket: Bucket) -> torch.Tensor:
        values = bucket.values
        if self.node is not None:
            self.node.to_first(values)
            values.mul_(self.nnodes / self.world_size)
        if self._averager is not None:
            self._averager.average(bucket)
        if self.node is not None:
            self.node.from_first(values)
        return values


def on_bucket(state, bucket):  # type: ignore[no-untyped-def]
    """What DDP calls; it looks at the signature, and takes no annotation that is a string."""
    return state.submit(bucket)


def watch_failure(exchange: Exchange[Any], bucket: GradBucket) -> None:
    """Raise what the model's thread has met at the end of this backward, after DDP's own end of it."""
    if current_backward() == -1:
        exchange.engine.raise_failure()  # in Join, which calls the hook for a rank that is out of data
    elif bucket.index() == 0:
        after_backward(lambda: after_backward(exchange.engine.raise_failure))
