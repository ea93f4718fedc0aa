"""Loss scaling of a run: the scale, and the state of the gradients between `backward` and `optimizer_step`."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distwrap._internals.torch import has_scaled, version_of
from distwrap.errors import PrecisionError
from distwrap.group.world import RunPart, World, current_world
from distwrap.live_objects import instances


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
        self._marked: dict[int, tuple[torch.Tensor, int]] = {}
        self._user_scales = False

    def begin(self, model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        """Scale the losses of a model from now on; the first scaler is that of all models."""
        self.models.add(model)
        if self.scaler is None:
            self.scaler = scaler
            self.hook = register_optimizer_step_pre_hook(_refuse_scaled_step)

    def update(self) -> None:
        """Update the scale now, where optimizers have stepped, instead of at the next backward."""
        if self.scaler is not None and self.stepped:
            self.scaler.update()
            self.stepped = None

    def mark_gradients(self) -> None:
        """Remember the gradients of each model as `backward` left them."""
        self._marked = {
            id(parameter): (gradient, version_of(gradient))
            for model in self.models
            for parameter in model.parameters()
            if (gradient := parameter.grad) is not None
        }

    def refuse_changed_gradients(self, optimizer: Optimizer) -> None:
        """Raise where a marked gradient that the optimizer is to step over was changed; zero has no scale.

        Raises:
            PrecisionError: says which, and what to do instead.
        """
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            gradient, version = self._marked.get(id(parameter), (None, 0))
            now = parameter.grad
            changed = gradient is not None and now is not None and not (now is gradient and version_of(now) == version)
            if changed and (now.is_sparse or now.any()):
                models = (model.named_parameters() for model in self.models)
                name = next((name for named in models for name, each in named if each is parameter), "")
                raise PrecisionError(
                    f"rank {current_world().placement.rank}: the gradients were changed between backward(loss) "
                    f"and optimizer_step() under precision='fp16' (that of {name!r}, for example), where they "
                    "are still scaled: clipping would reduce them to almost nothing (DW105). Use "
                    "optimizer_step(optimizer, max_norm=...), or call distwrap.unscale(optimizer) before you "
                    "touch them."
                )
            self._marked.pop(id(parameter), None)  # so that zero_grad() frees it

    def sees_users_scaler(self) -> bool:
        """Look, until there is one, for a `GradScaler` of the user's that has scaled something."""
        self._user_scales = self._user_scales or any(
            scaler is not self.scaler and scaler.is_enabled() and has_scaled(scaler)
            for scaler in instances(torch.amp.GradScaler)
        )
        return self._user_scales

    def close(self) -> None:
        """Stop checking optimizer steps."""
        if self.hook is not None:
            self.hook.remove()


def _refuse_scaled_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer's own step while the gradients are scaled."""
    if current_world().part(LossScaling).is_scaled:
        raise PrecisionError(
            "optimizer.step() after distwrap.backward(loss) under precision='fp16': the gradients are still scaled, "
            "so the step would be thousands of times too long. Call distwrap.optimizer_step(optimizer) instead."
        )
