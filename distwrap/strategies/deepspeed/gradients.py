"""What stands in a parameter's ``grad`` while DeepSpeed's engine has the gradient in buffers of its own.

Without it ``grad`` would be empty after a backward, and torch's ``clip_grad_norm_`` would clip nothing in silence.
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
    """A gradient that is in the engine's hands: it can be taken away, as by ``zero_grad``, and nothing else.

    Attributes:
        kept: the tensor in whose place it stands; ``None`` where the engine holds the numbers.
        discard: called when it was set to zero in place.
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
