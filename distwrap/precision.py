"""Mixed precision: autocast around the forward, and for fp16 the one right order of scale, unscale, clip, step, update.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from distwrap.errors import ModelError, PrecisionError
from distwrap.group.world import Precision, World, current_world
from distwrap.model.diagnosis import explained

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

Forward = Callable[..., Any]


def autocast() -> AbstractContextManager[Any]:
    """Compute what is inside in the precision of this run; for code outside of a wrapped model's forward.

    Example:
        >>> with autocast():
        ...     loss = torch.ones(2, 2) @ torch.ones(2)
    """
    world = current_world()
    return InPrecision(world.precision, world.device).context()


class InPrecision:
    """How a wrapped model computes: under autocast, or with weights of a small type; its outputs come out in float32.

    Called on a forward, it returns one in that precision.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision, self._device = precision, device

    def __call__(self, forward: Forward) -> Forward:
        if self.precision == "32":
            return forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.inputs((args, kwargs))
            with self.context():
                outputs = forward(*args, **kwargs)
            return self.outputs(outputs)

        return run

    def weights(self, model: nn.Module) -> nn.Module:
        """Convert the weights where the precision is that of the weights too."""
        return model.to(torch.bfloat16) if self.precision == "bf16-true" else model

    def inputs(self, value: Any) -> Any:
        """Convert floating-point inputs in any nesting where autocast does not do it."""
        if self.precision != "bf16-true":
            return value
        return tree_map(lambda leaf: leaf.bfloat16() if _is_floating(leaf) else leaf, value)

    def context(self) -> AbstractContextManager[Any]:
        """Compute what is inside in this precision."""
        if self.precision in ("bf16", "fp16"):
            return torch.autocast(self._device.type, DTYPES[self.precision])
        return nullcontext()

    def outputs(self, value: Any) -> Any:
        """Convert small floating-point outputs in any nesting to float32, so that a loss is computed in full."""
        if self.precision == "32":
            return value
        value = tree_map(_to_float32, value)
        if self.precision == "fp16" and torch.is_grad_enabled():
            for output in tree_leaves(value):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(_refuse_unscaled)  # type: ignore[no-untyped-call]
        return value


def prepare_scaler(world: World, model: nn.Module) -> None:
    """Make the gradient scaler of fp16, and watch for optimizer steps on scaled gradients until teardown."""
    world.scaled.add(model)
    if world.scaler is None:
        world.scaler = torch.amp.GradScaler(world.device.type)
        handle = register_optimizer_step_pre_hook(_refuse_scaled_step)
        world.cleanup.callback(handle.remove)


def backward(loss: torch.Tensor) -> None:
    """Compute the gradients of a loss: ``loss.backward()``, scaled where the precision is fp16.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> backward((2 * weight).sum())
        >>> weight.grad
        tensor([2.])
    """
    world = current_world()
    if world.scaler is not None:
        settle_scale(world)
        world.stepped, world.unscaled = set(), set()
        world.grads_are_scaled = True
        loss = world.scaler.scale(loss)
    try:
        if world.strategy is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            world.strategy.backward(loss)
    except RuntimeError as error:
        raise explained(error)  # noqa: B904 - which knows its cause
    if world.scaler is not None:
        _mark_gradients(world)


def settle_scale(world: World) -> None:
    """Update the scale now, where optimizers have stepped, instead of at the next backward."""
    if world.scaler is not None and world.stepped:
        world.scaler.update()
        world.stepped = None


def optimizer_step(
    optimizer: Optimizer,
    *,
    model: nn.Module | None = None,
    max_norm: float | None = None,
    scheduler: LRScheduler | None = None,
) -> bool:
    """Clip and step; under fp16 unscale, clip, step or skip, and update the scale, in this order.

    Args:
        optimizer: steps over the gradients that `backward` left.
        model: whose gradients are clipped; by default all that the optimizer holds.
        max_norm: the norm to which the gradients are clipped, or ``None``.
        scheduler: of the learning rate, stepped if the optimizer was.

    Returns:
        Whether the step was taken: under fp16 it is skipped where a gradient overflowed, and so is the scheduler's.

    Raises:
        PrecisionError: under fp16, `backward` was not called since the last step, or the gradients were changed, as by
            a clip of one's own, while they were scaled.
        ModelError: in the middle of a window of `accumulate`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> backward((2 * weight).sum())
        >>> optimizer_step(optimizer, max_norm=1.0)
        True
        >>> round(weight.item(), 3)
        0.5
    """
    world = current_world()
    _refuse_half_a_window(world)
    if world.scaler is None:
        _clip(optimizer, model, max_norm)
        if world.strategy is None:
            optimizer.step()
        else:
            world.strategy.step(optimizer)
        return _stepped(scheduler, True)
    if world.stepped is None or id(optimizer) in world.stepped:
        raise PrecisionError(
            "optimizer_step() under precision='fp16', but backward(loss) was not called since the last step: "
            "the gradients are not scaled. Call distwrap.backward(loss) instead of loss.backward()."
        )
    scaler = world.scaler
    if id(optimizer) not in world.unscaled:
        _refuse_changed_gradients(world)
        scaler.unscale_(optimizer)
    world.unscaled.discard(id(optimizer))
    _clip(optimizer, model, max_norm)
    overflowed = any(found.item() for found in scaler._found_inf_per_device(optimizer).values())
    world.grads_are_scaled = False
    scaler.step(optimizer)
    for exchange in list(world.exchanges) if overflowed else ():
        exchange.skipped(optimizer)
    # The scale is updated before the next backward: another optimizer may still have gradients in the present one.
    world.stepped.add(id(optimizer))
    return _stepped(scheduler, not overflowed)


def unscale(optimizer: Optimizer) -> None:
    """Take the scale of fp16 off an optimizer's gradients, to look at them or change them before `optimizer_step`.

    A no-op in other precisions.

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
    world = current_world()
    if world.scaler is None:
        return
    if world.stepped is None or id(optimizer) in world.stepped | world.unscaled:
        raise PrecisionError("unscale(): the gradients are not scaled. Call distwrap.backward(loss) first, and once.")
    _refuse_changed_gradients(world)
    world.scaler.unscale_(optimizer)
    world.unscaled.add(id(optimizer))


def _stepped(scheduler: LRScheduler | None, taken: bool) -> bool:
    if scheduler is not None and taken:
        scheduler.step()
    return taken


def _refuse_half_a_window(world: World) -> None:
    window = world.window
    if window is not None and not window.last:
        raise ModelError(
            f"optimizer_step() after micro-batch {window.index + 1} of {window.size} in accumulate(): the gradients "
            f"are this rank's own until the last. Step where window.last is true."
        )


def _mark_gradients(world: World) -> None:
    """Remember one gradient of each model as `backward` left it."""
    world.marked = []
    for model in world.scaled:
        gradient = next((p.grad for p in model.parameters() if p.grad is not None), None)
        if gradient is not None:
            world.marked.append((gradient, gradient._version))


def _refuse_changed_gradients(world: World) -> None:
    if any(gradient._version != version for gradient, version in world.marked):
        raise PrecisionError(
            "the gradients were changed between distwrap.backward(loss) and optimizer_step() under precision='fp16', "
            "where they are still scaled: a clip would cut them to nothing. Use optimizer_step(optimizer, "
            "max_norm=...), or call distwrap.unscale(optimizer) before you touch them."
        )


def _clip(optimizer: Optimizer, model: nn.Module | None, max_norm: float | None) -> None:
    if max_norm is not None:
        held: Iterable[torch.Tensor] = (p for group in optimizer.param_groups for p in group["params"])
        nn.utils.clip_grad_norm_(model.parameters() if model is not None else held, max_norm)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _to_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def _refuse_unscaled(grad: torch.Tensor) -> None:
    """Runs in a backward through a model in fp16: somebody must have scaled the loss."""
    if not current_world().grads_are_scaled and not _user_scales():
        raise PrecisionError(
            "loss.backward() under precision='fp16': small gradients would silently become zero. "
            "Call distwrap.backward(loss) and distwrap.optimizer_step(optimizer), or use torch's own GradScaler."
        )


def _refuse_scaled_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before any optimizer's step in a run in fp16."""
    if current_world().grads_are_scaled:
        raise PrecisionError(
            "optimizer.step() after distwrap.backward(loss) under precision='fp16': the gradients are still scaled, "
            "so the step would be thousands of times too long. Call distwrap.optimizer_step(optimizer) instead."
        )


def _user_scales() -> bool:
    """Look, until there is one, for a `GradScaler` of the user's that has scaled something."""
    world = current_world()
    if not world.user_scales:
        world.user_scales = any(
            issubclass(type(obj), torch.amp.GradScaler) and obj is not world.scaler and obj._scale is not None
            for obj in gc.get_objects()
        )
    return world.user_scales
