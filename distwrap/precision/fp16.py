"""float16 under autocast, with scaled losses.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from distwrap._internals.torch_tree import tensors_in
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
        return torch.amp.GradScaler(device.type)


def _refuse_unscaled(grad: torch.Tensor) -> None:
    """Refuse a backward through a model in fp16 whose loss nobody has scaled."""
    if not (scaling := current_world().part(LossScaling)).is_scaled and not scaling.sees_users_scaler():
        raise PrecisionError(
            "loss.backward() under precision='fp16': small gradients would silently become zero. "
            "Call distwrap.backward(loss) and distwrap.optimizer_step(optimizer), or use torch's own GradScaler."
        )
