"""A step of a hand-written loop: backward, unscale, clip, step and update, in the right order.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import has_overflowed
from distwrap.errors import ModelError, PrecisionError
from distwrap.group.world import World, current_world
from distwrap.model.checks.diagnosis import explained
from distwrap.model.wrapped_models import WrappedModels, parameters_of, strategy_of
from distwrap.precision import LossScaling
from distwrap.precision.loss_scaling import ScaleState
from distwrap.protocols import Strategy
from distwrap.strategies.windows import Windows


class Step(int):
    """Outcome of `optimizer_step`: true if the step was taken, else false.

    Attributes:
        norm: the norm of all gradients before clipping, over the whole model on all ranks, as a scalar tensor. It is
            infinite or NaN if a gradient overflowed, and ``None`` without ``max_norm``.
    """

    norm: torch.Tensor | None

    def __new__(cls, taken: bool, norm: torch.Tensor | float | None = None) -> Step:
        """Make an outcome from whether the step was taken, and the norm."""
        step = super().__new__(cls, taken)
        step.norm = torch.as_tensor(norm).detach() if norm is not None else None
        return step

    def __repr__(self) -> str:
        return repr(bool(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Step, (bool(self), self.norm)


def backward(loss: torch.Tensor) -> None:
    """Compute the gradients of a loss, as ``loss.backward()`` does; under fp16 the loss is scaled first.

    Args:
        loss: a scalar.

    Raises:
        ModelError: models of this run were wrapped by several strategies, one of which has a backward of its own.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> backward((2 * weight).sum())
        >>> weight.grad
        tensor([2.])
    """
    world = current_world()
    scaling = world.part(LossScaling)
    strategy = _strategy_of_loss(world)
    scaler = None if strategy.owns_scale else scaling.scaler
    with nullcontext() if scaler is None else scaling.backward():
        try:
            strategy.backward(loss if scaler is None else scaler.scale(loss))
        except RuntimeError as error:
            raise explained(error)  # noqa: B904 - it has its cause


def optimizer_step(
    optimizer: Optimizer,
    *,
    model: nn.Module | None = None,
    max_norm: float | None = None,
    scheduler: LRScheduler | None = None,
) -> Step:
    """Clip the gradients and step the optimizer; under fp16 unscale before, skip on overflow, and update the scale.

    Args:
        optimizer: an optimizer of the gradients that `backward` has computed.
        model: the model whose gradients are clipped; by default all gradients that the optimizer holds.
        max_norm: the norm to which the gradients are clipped. ``inf`` only measures the norm, ``None`` does neither.
        scheduler: a scheduler of the learning rate, which steps if the optimizer did.

    Returns:
        Whether the step was taken, as a `Step`, which has the norm as its attribute. Under fp16 the step, and the
        scheduler's, are skipped if a gradient overflowed.

    Raises:
        PrecisionError: under fp16, `backward` was not called since the last step, or the gradients were changed, as by
            a clip of your own, while they were scaled.
        ModelError: the step is in the middle of a window of `accumulate`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> backward((2 * weight).sum())
        >>> step = optimizer_step(optimizer, max_norm=1.0)
        >>> step, step.norm
        (True, tensor(2.))
        >>> round(weight.item(), 3)
        0.5
    """
    world = current_world()
    strategy, scaling = strategy_of(optimizer, world), world.part(LossScaling)
    world.part(Windows).refuse_half(optimizer)
    state = ScaleState.READY if scaling.scaler is None or strategy.owns_scale else scaling.state_of(optimizer)
    if state in (ScaleState.READY, ScaleState.STEPPED):
        if scaling.must_be_scaled(optimizer) and not strategy.owns_scale:
            raise PrecisionError(
                "optimizer_step() under precision='fp16', but backward(loss) was not called since the last step: "
                "the gradients are not scaled. Call distwrap.backward(loss) instead of loss.backward()."
            )
        norm = _clip(strategy, optimizer, model, max_norm)
        taken = strategy.step(optimizer) is not False
        return _stepped(scheduler, taken, norm if norm is not None or max_norm is None else strategy.norm(optimizer))
    if state is ScaleState.SCALED:
        scaling.unscale(optimizer)
    norm = _clip(strategy, optimizer, model, max_norm)
    assert scaling.scaler is not None
    overflowed = has_overflowed(scaling.scaler, optimizer)
    # The next backward updates the scale, since another optimizer may still need the present one for its gradients.
    scaling.begin_step(optimizer)
    taken = not overflowed and strategy.step(optimizer) is not False
    for act in scaling.on_skipped if overflowed else ():
        act(optimizer)
    return _stepped(scheduler, taken, norm)


def unscale(optimizer: Optimizer) -> None:
    """Undo the scaling of an optimizer's gradients under fp16, to read or change them before `optimizer_step`.

    It does nothing in other precisions.

    Args:
        optimizer: the optimizer whose gradients are unscaled.

    Raises:
        PrecisionError: `backward` was not called since the last step, or the gradients were changed since.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> backward((2 * weight).sum())
        >>> unscale(optimizer)
        >>> weight.grad
        tensor([2.])
    """
    scaling = current_world().part(LossScaling)
    if scaling.scaler is None:
        return
    if scaling.state_of(optimizer) is not ScaleState.SCALED:
        raise PrecisionError("unscale(): the gradients are not scaled. Call distwrap.backward(loss) first, and once.")
    scaling.unscale(optimizer)


def _strategy_of_loss(world: World) -> Strategy:
    """Return the strategy of the run's models, or the run's own if there are none."""
    of_models = [strategy_of(model, world) for model in world.part(WrappedModels)] or [world.strategy]
    several = list({id(strategy): strategy for strategy in of_models}.values())
    for strategy in several if len(several) > 1 else ():
        if strategy.owns_scale or type(strategy).backward is not Strategy.backward:
            names = " and ".join(type(strategy).__name__ for strategy in several)
            raise ModelError(
                f"rank {world.placement.rank}: backward(loss) cannot know whose loss this is: models of this "
                f"run were wrapped by {names}, and {type(strategy).__name__} has a backward of its own. Wrap "
                "all models by one strategy: give the same object to each wrap_model(strategy=…)."
            )
    return several[0]


def _stepped(scheduler: LRScheduler | None, taken: bool, norm: torch.Tensor | float | None) -> Step:
    if scheduler is not None and taken:
        scheduler.step()
    return Step(taken, norm)


def _clip(
    strategy: Strategy, optimizer: Optimizer, model: nn.Module | None, max_norm: float | None
) -> torch.Tensor | float | None:
    if max_norm is None:
        return None
    clipped = model.parameters() if model is not None else parameters_of(optimizer).values()
    return strategy.clip(optimizer, clipped, max_norm)
