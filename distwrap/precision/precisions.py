"""Precisions: full, bfloat16 and float16, and one on a device, around forwards.

Sources: https://docs.pytorch.org/docs/stable/amp.html and https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from distwrap import protocols
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.devices.kinds import widest
from distwrap.errors import PrecisionError
from distwrap.group.world import RunPart, World, current_world
from distwrap.precision.loss_scaling import LossScaling
from distwrap.registry import precisions


class Precision(protocols.Precision):
    __doc__ = protocols.Precision.__doc__

    def outputs(self, value: Any) -> Any:
        return map_tensors(_to_float32, value)


class FullPrecision(Precision):
    """Weights, inputs and outputs as they are."""

    is_plain = True

    def outputs(self, value: Any) -> Any:
        return value


def _to_float32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


class MixedBF16(Precision):
    """Weights in float32, a forward under autocast to bfloat16."""

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)


class TrueBF16(Precision):
    """Weights and inputs in bfloat16."""

    def weights(self, model: nn.Module) -> nn.Module:
        return model.to(torch.bfloat16)

    def inputs(self, value: Any) -> Any:
        return map_tensors(_to_bfloat16, value)


def _to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16() if value.is_floating_point() else value


class MixedFP16(Precision):
    """Weights in float32, a forward under autocast to float16; the loss must be scaled before its backward."""

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.float16)

    def require_scaled(self, outputs: Any) -> None:
        if torch.is_grad_enabled():
            for output in tensors_in(outputs):
                if output.requires_grad:
                    output.register_hook(_refuse_unscaled)  # type: ignore[no-untyped-call]

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        return (torch.amp.GradScaler if widest(device) == torch.float64 else _NarrowScaler)(device.type)


class _NarrowScaler(torch.amp.GradScaler):
    """torch's, but for devices without float64, in which it inverts its scale: a power of two, exact in float32 too."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        with _WithoutFloat64():
            super().unscale_(optimizer)


class _WithoutFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.Tensor.float if func is torch.Tensor.double else func)(*args, **(kwargs or {}))


def _refuse_unscaled(grad: torch.Tensor) -> None:
    """Refuse a backward through a model in fp16 with a loss that is not scaled."""
    if not (scaling := current_world().part(LossScaling)).in_backward and not scaling.sees_users_scaler():
        raise PrecisionError(
            "loss.backward() under precision='fp16': small gradients would become zero unnoticed. Call "
            "distwrap.backward(loss) and distwrap.optimizer_step(optimizer), or use torch's own GradScaler, "
            f"made for the device: GradScaler({current_world().device.type!r}). A scaler made for CUDA scales "
            "nothing elsewhere."
        )


Forward = Callable[..., Any]


class InPrecision:
    """Precision bound to a device; called with a forward, it returns that forward in the precision.

    Args:
        precision: a `Precision`, or the name of one.
        device: on which the forward computes.
        owns_scale: whether the strategy scales losses by itself.

    Attributes:
        changes_inputs: whether a forward's inputs may come out of `inputs` as others.
    """

    def __init__(self, precision: str | protocols.Precision, device: torch.device, *, owns_scale: bool = False) -> None:
        self.precision = precisions.make(precision)
        self.device, self._owns_scale = device, owns_scale
        self.is_plain, self.inputs = self.precision.is_plain, self.precision.inputs
        self.changes_inputs = getattr(type(self.precision), "inputs", None) is not Precision.inputs

    def __call__(self, forward: Forward) -> Forward:
        if self.is_plain:
            return forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.inputs((args, kwargs))
            with self.context():
                outputs = forward(*args, **kwargs)
            return self.outputs(outputs)

        return run

    def outputs(self, value: Any) -> Any:
        """Return a forward's outputs in the type in which a loss is computed."""
        value = self.precision.outputs(value)
        if not self._owns_scale and hasattr(self.precision, "require_scaled"):  # a subclass of Precision has it
            self.precision.require_scaled(value)
        return value

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return a scaler of losses, where distwrap is to scale them."""
        scaler = None if self._owns_scale else self.precision.make_scaler(self.device)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward runs."""
        return self.precision.context(self.device)


class RunPrecision(RunPart):
    """The precision of one run, on its device."""

    def __init__(self, world: World) -> None:
        self.chosen = InPrecision(world.options.precision, world.device)


def autocast() -> AbstractContextManager[Any]:
    """Compute in the precision of this run within a ``with``, for code outside of a wrapped model's forward.

    Example:
        >>> with autocast():
        ...     loss = torch.ones(2, 2) @ torch.ones(2)
    """
    return current_world().part(RunPrecision).chosen.context()
