"""Exchange of gradients: DDP submits its buckets in a backward, and the model's thread averages them in order.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer

from distwrap.comm.base import Algorithm, Averager, Bucket
from distwrap.comm.exchange import Exchange
from distwrap.comm.link import Link
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
