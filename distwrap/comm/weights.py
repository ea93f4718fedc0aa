"""Weights of replicas that train on their own, and are brought together around the optimizer's steps.

A node, where the algorithm is hierarchical, is one replica: its ranks average gradients as under DDP.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import foreach
from distwrap.checks import whole
from distwrap.comm.base import Algorithm, option
from distwrap.comm.exchange import Exchange
from distwrap.comm.link import Link, real_numbers
from distwrap.group.world import World
from distwrap.model.distributed import DistributedModel
from distwrap.model.wrapped_models import parameters_of


@dataclass(frozen=True, kw_only=True)
class WeightAlgorithm(Algorithm):
    """Algorithm in which the ranks hold different weights, which are brought together now and then.

    Args:
        warmup_steps: optimizer steps in which gradients are averaged, as under DDP.

    Attributes:
        exchange_class: the class that does the work for one model; a subclass names its own.
    """

    warmup_steps: int = option(0, whole(0))
    same_weights: ClassVar[bool] = False
    exchange_class: ClassVar[type[WeightExchange[Any]]]

    def attach(self, model: DistributedModel, world: World) -> WeightExchange[Any]:
        return self.exchange_class(self, model, world)


class FlatWeights:
    """Some parameters, read and written as one tensor.

    Args:
        parameters: of floating-point or complex types, in the same order on every rank. A complex one is two numbers.

    Attributes:
        dtype: the type of that tensor: float32, or float64 where a parameter has it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in self.parameters)
        self.dtype = torch.float64 if double else torch.float32

    def read(self) -> torch.Tensor:
        """Return a copy of the weights."""
        parts = self._parts()
        flat = torch.empty(sum(part.numel() for part in parts), dtype=self.dtype, device=parts[0].device)
        foreach("copy_", _views(flat, parts), parts)
        return flat

    def write(self, flat: torch.Tensor) -> None:
        """Set the weights."""
        parts = self._parts()
        foreach("copy_", parts, _views(flat, parts))

    def _parts(self) -> list[torch.Tensor]:
        return [real_numbers(parameter.detach()) for parameter in self.parameters]


def _views(flat: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    shares = torch.split(flat, [part.numel() for part in parts])
    return [share.view(part.shape) for share, part in zip(shares, parts, strict=True)]


W = TypeVar("W", bound=WeightAlgorithm)


class WeightExchange(Exchange[W]):
    """Exchange of one model's weights, around the steps of whatever optimizers hold them.

    In a step each weight is changed at most once: by one optimizer, or by several, one after the other. It ends when as
    many weights have changed as in the step before, at first all, or when one is about to change again.

    Attributes:
        everyone: the link between all ranks.
        weights: the model's trained weights, to read and to write.
        steps: the number of steps until now.
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
        self.weights = FlatWeights([parameter for parameter in model.parameters() if parameter.requires_grad])
        self._places = {id(parameter): place for place, parameter in enumerate(self.weights.parameters)}
        self._stepped: frozenset[int] = frozenset()  # the places of the weights that have changed in this step
        self._usual = frozenset(self._places.values())  # and in the one before
        self._exchanges.watch_steps(self)
        self._tell_model()

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
        """Act before any optimizer's step."""
        held = self._held_by(optimizer)
        if not self._stepped.isdisjoint(held):
            self._end_step()
        if held and not self._stepped and self.steps >= self.algorithm.warmup_steps:
            if not self._begun:
                self._begun = True
                self.begin()
            self.before_step()

    def after(self, optimizer: Optimizer) -> None:
        """Act after any optimizer's step."""
        held = self._held_by(optimizer)
        if not held:
            return
        self._stepped = self._stepped | held
        self.alike = self.alike and self.steps < self.algorithm.warmup_steps
        if self._stepped >= self._usual:
            self._end_step()

    def _held_by(self, optimizer: Optimizer) -> frozenset[int]:
        """Return the places of the weights that an optimizer holds."""
        if self.model is None:
            return frozenset()
        return frozenset(self._places[key] for key in parameters_of(optimizer) if key in self._places)

    def _end_step(self) -> None:
        self._usual, self._stepped = self._stepped, frozenset()
        self.steps += 1
        if self.steps > self.algorithm.warmup_steps:
            self.after_step(self.steps - self.algorithm.warmup_steps)
        self._tell_model()

    def _tell_model(self) -> None:
        """Keep DDP's reducer out of the backward where gradients are not averaged any more."""
        if self.model is not None:
            self.model._trains_alone = self.node is None and self.steps >= self.algorithm.warmup_steps

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that goes on needs beside weights and optimizer; rank 0's is for all ranks."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with weights that are the same on all ranks."""
        self.steps, self._begun, self._stepped = state["steps"], False, frozenset()
        self._tell_model()

    # Gradients, in the warm-up or inside a node

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        link = self.everyone if self.steps < self.algorithm.warmup_steps else self.node
        assert link is not None
        values = bucket.buffer()
        return self.engine.submit(partial(_averaged, link, values), otherwise=values)

    # Weights

    def among_replicas(self, work: Callable[[Link, torch.Tensor], None], values: torch.Tensor) -> torch.Tensor:
        """Do some work on `values` between the replicas, and return them; a node's ranks get its first one's result."""
        if self.link is not None:
            work(self.link, values)
        if self.node is not None:
            self.node.from_first(values)
        return values

    def exchange_weights(self, work: Callable[[Link, torch.Tensor], None]) -> None:
        """Replace the weights by what some work between the replicas makes of them, and wait for it."""
        self.weights.write(self.engine.call(partial(self.among_replicas, work, self.weights.read())))

    def consolidate(self) -> torch.Tensor:
        """Give all ranks the mean of their weights, and return this one's own; a collective."""
        self.settle()
        own = self.weights.read()
        self.weights.write(self.engine.call(partial(_averaged, self.everyone, own.clone())))
        self.alike = True
        return own

    def restore(self, own: torch.Tensor) -> None:
        """Go on with this rank's own weights."""
        self.weights.write(own)
        self.alike = False


def _averaged(link: Link, values: torch.Tensor) -> torch.Tensor:
    link.mean(values)
    return values
