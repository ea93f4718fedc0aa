"""Weights of replicas that train on their own, and are brought together around the optimizer's steps.

A node, where the algorithm is hierarchical, is one replica: its ranks average gradients as under DDP.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distwrap.checks import whole
from distwrap.comm.base import Algorithm
from distwrap.comm.exchange import Exchange, Exchanges
from distwrap.comm.flat import FlatWeights, trained
from distwrap.comm.gradients import on_bucket, watch_failure
from distwrap.comm.link import Link
from distwrap.group.world import World, current_world
from distwrap.precision import LossScaling

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel


@dataclass(frozen=True, kw_only=True)
class WeightAlgorithm(Algorithm):
    """The ranks hold different weights, which are brought together now and then.

    Args:
        warmup_steps: optimizer steps in which gradients are averaged, as under DDP.
    """

    warmup_steps: int = 0
    same_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole(0)("warmup_steps", self.warmup_steps)


W = TypeVar("W", bound=WeightAlgorithm)


class WeightExchange(Exchange[W]):
    """A weight algorithm at work for one model. The steps that count are those of the first optimizer that steps.

    Attributes:
        everyone: between all ranks.
        steps: how many there were.
        alike: whether the ranks hold the same weights now, as far as is known here.
    """

    def __init__(self, algorithm: W, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        everyone = self.link
        if self.node is not None:
            everyone = self.between(world, list(range(self.world_size)), crosses_nodes=self.nnodes > 1)
        assert everyone is not None
        self.everyone = everyone
        self.steps, self.alike = 0, True
        self._begun = False
        parameters = trained(model)
        self._held = set(map(id, parameters))
        self.weights = FlatWeights(parameters)
        self._optimizer: Optimizer | None = None
        _listen(world)
        self._all.of_weights.append(self)
        model.register_comm_hook(self, on_bucket)
        self._let_go()

    # What subclasses do, on every rank, in the training thread

    def begin(self) -> None:
        """Prepare for the first step without averaged gradients; all ranks hold the same weights."""

    def before_step(self) -> None:
        """Act before an optimizer step."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Act after an optimizer step, the `step`-th since gradients are no longer averaged, from 1."""

    def settle(self) -> None:
        """Bring what is under way to an end, with the other ranks; weights may change."""

    def brought_together(self) -> None:
        """Take note that all ranks hold the same weights now, and will go on from there."""

    # Steps

    def before(self, optimizer: Optimizer) -> None:
        """Run before any optimizer's step."""
        if self._is_mine(optimizer) and self.steps >= self.algorithm.warmup_steps:
            if not self._begun:
                self._begun = True
                self.begin()
            self.before_step()

    def after(self, optimizer: Optimizer) -> None:
        """Run after any optimizer's step."""
        if not self._is_mine(optimizer):
            return
        self.steps += 1
        if self.steps > self.algorithm.warmup_steps:
            self.alike = False
            self.after_step(self.steps - self.algorithm.warmup_steps)
        self._let_go()

    def skipped(self, optimizer: Optimizer) -> None:
        """Count a step that fp16 has skipped on this rank: the others may have taken it."""
        self.before(optimizer)
        self.after(optimizer)

    def _is_mine(self, optimizer: Optimizer) -> bool:
        if self.model is None:
            return False
        if self._optimizer is None:
            held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            if self._held.isdisjoint(held):
                return False
            self._optimizer = optimizer
        return optimizer is self._optimizer

    def _let_go(self) -> None:
        """Where gradients are not averaged any more, keep DDP's reducer out of the backward."""
        if self.model is not None:
            self.model.__dict__["_trains_alone"] = self.node is None and self.steps >= self.algorithm.warmup_steps

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that goes on needs beside weights and optimizer; rank 0's is for all ranks."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with weights that are the same on all ranks."""
        self.steps, self._begun = state["steps"], False
        self._let_go()

    # Gradients, in the warm-up or inside a node

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue a bucket; the future has its buffer when it holds the mean."""
        watch_failure(self, bucket)
        link = self.everyone if self.steps < self.algorithm.warmup_steps else self.node
        assert link is not None
        values = bucket.buffer()
        return self.engine.submit(partial(_averaged, link, values), otherwise=values)

    # Weights

    def among_replicas(self, work: Callable[[Link, torch.Tensor], None], values: torch.Tensor) -> None:
        """Do some work on `values` between the replicas; all ranks of a node get its first one's result."""
        if self.link is not None:
            work(self.link, values)
        if self.node is not None:
            self.node.from_first(values)

    def consolidate(self) -> torch.Tensor:
        """Give all ranks the mean of their weights, and return this one's own; a collective."""
        self.settle()
        own = self.weights.read()
        mean = own.clone()
        self.engine.call(partial(self.everyone.mean, mean))
        self.weights.write(mean)
        self.alike = True
        return own

    def restore(self, own: torch.Tensor) -> None:
        """Go on with this rank's own weights."""
        self.weights.write(own)
        self.alike = False

    def close(self) -> None:
        if self in self._all.of_weights:
            self._all.of_weights.remove(self)
        super().close()


def _averaged(link: Link, values: torch.Tensor) -> torch.Tensor:
    link.mean(values)
    return values


def _listen(world: World) -> None:
    """Watch all optimizers' steps until teardown. Hooks must not go while torch runs them, as a model's may."""
    exchanges = world.part(Exchanges)
    if not exchanges.handles:
        exchanges.handles = [register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)]
        world.part(LossScaling).on_skipped.append(_skipped)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for exchange in list(current_world().part(Exchanges).of_weights):
        exchange.before(optimizer)


def _skipped(optimizer: Optimizer) -> None:
    for exchange in list(current_world().part(Exchanges).of_weights):
        exchange.skipped(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for exchange in list(current_world().part(Exchanges).of_weights):
        exchange.after(optimizer)
