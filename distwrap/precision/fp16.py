"""float16 under autocast, with scaled losses.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distwrap._internals.torch_tree import tensors_in
from distwrap.devices.kinds import widest
from distwrap.errors import PrecisionError
from distwrap.group.world import current_world
from distwrap.precision.base import Precision
from distwrap.precision.loss_scaling import LossScaling


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
