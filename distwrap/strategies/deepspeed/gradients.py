"""Placeholders in ``.grad`` while DeepSpeed's engine has the gradients in its own buffers.

Without them ``.grad`` would be empty after a backward, and torch's ``clip_grad_norm_`` would silently clip nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distwrap._internals.torch_subclass import wrapper_tensor
from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import ModelError
from distwrap.group.world import current_world

_TAKEN_AWAY = {"zero_", "_foreach_zero_"}
_HARMLESS = {"detach", "detach_", "alias"}


class EngineGradient(torch.Tensor):
    """Gradient that the engine holds. It can be removed, as by ``zero_grad``, but not used.

    Attributes:
        kept: the tensor that it replaces; ``None`` if the engine has the numbers.
        discard: called when the gradient is set to zero in place.
    """

    kept: torch.Tensor | None
    discard: Callable[[], None]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, kept: torch.Tensor | None, discard: Callable[[], None]) -> EngineGradient:
        made: EngineGradient = wrapper_tensor(cls, parameter.detach(), parameter.device)
        made.kept, made.discard = kept, discard
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = str(func.overloadpacket.__name__)
        if name in _TAKEN_AWAY:
            for gradient in tensors_in(args):
                if isinstance(gradient, EngineGradient):
                    gradient.discard()
            return args[0]
        if name in _HARMLESS:
            return args[0]
        raise ModelError(
            f"rank {current_world().placement.rank}: a gradient was used between the backward and the step "
            f"under strategy='deepspeed' (by {name}), when the engine keeps the gradients and each rank has "
            "only a share of them. Clip by distwrap.optimizer_step(optimizer, max_norm=…), which takes the "
            "norm of all gradients."
        )

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"EngineGradient({tuple(self.shape)})"
