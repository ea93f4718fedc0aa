"""Rounds of many own steps of each member, then a mean of their weights, or an outer step along their progress.

A member that is lost in a round loses only its own progress.
Sources: https://arxiv.org/abs/1805.09767, algorithm 1; https://arxiv.org/abs/2311.08105, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from distwrap.comm import Algorithm, DiLoCo, LocalSGD
from distwrap.comm.weights import FlatWeights
from distwrap.errors import OptionError
from distwrap.group.world import current_world
from distwrap.model.wrapped_models import parameters_of

Tensors = list[torch.Tensor]
EndRound = Callable[[Callable[[], Tensors]], Tensors]


class WeightRounds:
    """Rounds of one model.

    Args:
        model: the trained model.
        end_round: takes a function that averages over the members, ends the step of the round, and returns the mean.
        algorithm: `LocalSGD` or `DiLoCo`.
        statistics: returns the model's running statistics, which are those of rank 0 after a round.

    Attributes:
        anchor: the weights after the last round, the same on all members.
    """

    def __init__(
        self, model: nn.Module, end_round: EndRound, algorithm: LocalSGD | DiLoCo, statistics: Callable[[], Tensors]
    ) -> None:
        self._end_round, self._algorithm, self._statistics = end_round, algorithm, statistics
        self._weights = FlatWeights([each for each in model.parameters() if each.requires_grad])
        self._held = {id(each) for each in self._weights.parameters}
        self.anchor = self._weights.read()
        self._momentum = torch.zeros_like(self.anchor)
        self._steps = 0
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._held.isdisjoint(parameters_of(optimizer)):
            self._steps += 1
            if self._steps >= self._algorithm.sync_every:
                self.end()

    def end(self) -> None:
        """End the current round, if there is one."""
        if not self._steps:
            return
        self._steps = 0
        weights = self._weights.read()
        own = self._statistics()
        mean, *statistics = self._end_round(lambda: [_mean(weights), *map(_of_first, own)])
        for buffer, value in zip(own, statistics, strict=True):
            buffer.copy_(value)
        if isinstance(self._algorithm, DiLoCo):
            progress, momentum = self.anchor - mean, self._algorithm.outer_momentum
            self._momentum.mul_(momentum).add_(progress)
            mean = self.anchor.sub(progress + momentum * self._momentum, alpha=self._algorithm.outer_lr)
        self.anchor = mean.clone()
        self._weights.write(mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a rank that comes back."""
        return {"anchor": self.anchor, "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, at the start of a round."""
        self.anchor, self._momentum = state["anchor"].clone(), state["momentum"].clone()
        self._steps = 0

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def refuse_unlike(algorithm: Algorithm) -> None:
    """Refuse algorithms, or options of them, that do not allow ranks to come and go.

    Raises:
        OptionError: the algorithm does not; the message names those that do.
    """
    plain = isinstance(algorithm, (LocalSGD, DiLoCo)) and not (algorithm.hierarchical or algorithm.warmup_steps)
    if plain and isinstance(algorithm, DiLoCo):
        rest = (algorithm.fragments, algorithm.delay, algorithm.mixing, algorithm.compression)
        plain = rest == (1, 0, 0.0, None)
    if not plain:
        raise OptionError(
            f"comm={algorithm!r} does not go with max_lost=: torchft exchanges the gradients, or weights by "
            f"comm='local_sgd(sync_every=…)' or 'diloco(sync_every=…, outer_lr=…, outer_momentum=…)'."
        )


def _mean(weights: torch.Tensor) -> torch.Tensor:
    mean = weights / current_world().placement.world_size
    dist.all_reduce(mean)
    return mean


def _of_first(buffer: torch.Tensor) -> torch.Tensor:
    value = buffer.clone()
    dist.broadcast(value, src=0)
    return value
