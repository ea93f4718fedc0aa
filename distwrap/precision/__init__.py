"""Mixed precision: autocast around the forward, and for fp16 the one right order of scale, unscale, clip, step, update.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distwrap._internals.torch import has_overflowed, has_scaled, tree_leaves, tree_map, version_of
from distwrap.errors import ModelError, PrecisionError
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.diagnosis import explained

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

Forward = Callable[..., Any]


def autocast() -> AbstractContextManager[Any]:
    """Compute what is inside in the precision of this run; for code outside of a wrapped model's forward.

    Example:
        >>> with autocast():
        ...     loss = torch.ones(2, 2) @ torch.ones(2)
    """
    world = current_world()
    return InPrecision(str(world.options.precision), world.device).context()


class InPrecision:
    """How a wrapped model computes: under autocast, or with weights of a small type; its outputs come out in float32.

    Called on a forward, it returns one in that precision.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
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


class LossScaling(RunPart):
    """Loss scaling of fp16 in one run.

    Attributes:
        scaler: torch's; made when the first model is wrapped in fp16.
        is_scaled: whether `backward` ran since the last `optimizer_step`, so that the gradients are scaled.
        stepped: ids of the optimizers that have stepped since `backward`; ``None`` before the first.
        unscaled: ids of the optimizers whose gradients were unscaled since `backward`.
        models: in fp16.
        on_skipped: called with an optimizer whose step was skipped, because a gradient overflowed.
        hook: of the check before each optimizer step.
    """

    def __init__(self, world: World) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.is_scaled = False
        self.stepped: set[int] | None = None
        self.unscaled: set[int] = set()
        self.models: WeakSet[nn.Module] = WeakSet()
        self.on_skipped: list[Callable[[Optimizer], None]] = []
        self.hook: RemovableHandle | None = None
        self._marked: list[tuple[torch.Tensor, int]] = []
        self._user_scales = False

    def update(self) -> None:
        """Update the scale now, where optimizers have stepped, instead of at the next backward."""
        if self.scaler is not None and self.stepped:
            self.scaler.update()
            self.stepped = None

    def mark_gradients(self) -> None:
        """Remember one gradient of each model as `backward` left it."""
        self._marked = []
        for model in self.models:
            gradient = next((p.grad for p in model.parameters() if p.grad is not None), None)
            if gradient is not None:
                self._marked.append((gradient, version_of(gradient)))

    def refuse_changed_gradients(self) -> None:
        """Raise where a marked gradient was changed.

        Raises:
            PrecisionError: says what to do instead.
        """
        if any(version_of(gradient) != version for gradient, version in self._marked):
            raise PrecisionError(
                "the gradients were changed between distwrap.backward(loss) and optimizer_step() under "
                "precision='fp16', where they are still scaled: a clip would cut them to nothing. Use "
                "optimizer_step(optimizer, max_norm=...), or call distwrap.unscale(optimizer) before you touch them."
            )

    def sees_users_scaler(self) -> bool:
        """Look, until there is one, for a `GradScaler` of the user's that has scaled something."""
        self._user_scales = self._user_scales or any(
            issubclass(type(obj), torch.amp.GradScaler) and obj is not self.scaler and has_scaled(obj)
            for obj in gc.get_objects()
        )
        return self._user_scales

    def close(self) -> None:
        """Check optimizer steps no more."""
        if self.hook is not None:
            self.hook.remove()


def prepare_scaler(world: World, model: nn.Module) -> None:
    """Make the gradient scaler of fp16, and watch for optimizer steps on scaled gradients until teardown."""
    scaling = world.part(LossScaling)
    scaling.models.add(model)
    if scaling.scaler is None:
        scaling.scaler = torch.amp.GradScaler(world.device.type)
        scaling.hook = register_optimizer_step_pre_hook(_refuse_scaled_step)


def backward(loss: torch.Tensor) -> None:
    """Compute the gradients of a loss: ``loss.backward()``, scaled where the precision is fp16.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> backward((2 * weight).sum())
        >>> weight.grad
        tensor([2.])
    """
    world = current_world()
    scaling = world.part(LossScaling)
    if scaling.scaler is not None:
        scaling.update()
        scaling.stepped, scaling.unscaled = set(), set()
        scaling.is_scaled = True
        loss = scaling.scaler.scale(loss)
    try:
        if world.options.strategy is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            world.options.strategy.backward(loss)
    except RuntimeError as error:
        raise explained(error)  # noqa: B904 - which knows its cause
    if scaling.scaler is not None:
        scaling.mark_gradients()


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
    scaling = world.part(LossScaling)
    _refuse_half_a_window(world)
    if scaling.scaler is None:
        _clip(optimizer, model, max_norm)
        if world.options.strategy is None:
            optimizer.step()
        else:
            world.options.strategy.step(optimizer)
        return _stepped(scheduler, True)
    if scaling.stepped is None or id(optimizer) in scaling.stepped:
        raise PrecisionError(
            "optimizer_step() under precision='fp16', but backward(loss) was not called since the last step: "
            "the gradients are not scaled. Call distwrap.backward(loss) instead of loss.backward()."
        )
    scaler = scaling.scaler
    if id(optimizer) not in scaling.unscaled:
        scaling.refuse_changed_gradients()
        scaler.unscale_(optimizer)
    scaling.unscaled.discard(id(optimizer))
    _clip(optimizer, model, max_norm)
    overflowed = has_overflowed(scaler, optimizer)
    scaling.is_scaled = False
    scaler.step(optimizer)
    for act in scaling.on_skipped if overflowed else ():
        act(optimizer)
    # The scale is updated before the next backward: another optimizer may still have gradients in the present one.
    scaling.stepped.add(id(optimizer))
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
    scaling = current_world().part(LossScaling)
    if scaling.scaler is None:
        return
    if scaling.stepped is None or id(optimizer) in scaling.stepped | scaling.unscaled:
        raise PrecisionError("unscale(): the gradients are not scaled. Call distwrap.backward(loss) first, and once.")
    scaling.refuse_changed_gradients()
    scaling.scaler.unscale_(optimizer)
    scaling.unscaled.add(id(optimizer))


def _stepped(scheduler: LRScheduler | None, taken: bool) -> bool:
    if scheduler is not None and taken:
        scheduler.step()
    return taken


def _refuse_half_a_window(world: World) -> None:
    from distwrap.model.accumulation import Windows

    window = world.part(Windows).current
    if window is not None and not window.last:
        raise ModelError(
            f"optimizer_step() after micro-batch {window.index + 1} of {window.size} in accumulate(): the gradients "
            f"are this rank's own until the last. Step where window.last is true."
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
    if not (scaling := current_world().part(LossScaling)).is_scaled and not scaling.sees_users_scaler():
        raise PrecisionError(
            "loss.backward() under precision='fp16': small gradients would silently become zero. "
            "Call distwrap.backward(loss) and distwrap.optimizer_step(optimizer), or use torch's own GradScaler."
        )


def _refuse_scaled_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before any optimizer's step in a run in fp16."""
    if current_world().part(LossScaling).is_scaled:
        raise PrecisionError(
            "optimizer.step() after distwrap.backward(loss) under precision='fp16': the gradients are still scaled, "
            "so the step would be thousands of times too long. Call distwrap.optimizer_step(optimizer) instead."
        )
