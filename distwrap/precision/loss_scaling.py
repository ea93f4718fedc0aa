"""Loss scaling of a run: the scale, and for each optimizer whether its gradients are scaled."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import has_scaled, version_of
from distwrap.errors import PrecisionError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World
from distwrap.live_objects import instances


class ScaleState(Enum):
    """State of an optimizer's gradients."""

    READY = "no backward has scaled them"
    SCALED = "scaled by the last backward"
    UNSCALED = "unscaled again, and not stepped over yet"
    STEPPED = "unscaled, and stepped over or skipped"


class LossScaling(RunPart):
    """Loss scaling of fp16 in one run.

    Attributes:
        scaler: torch's; made when the first model is wrapped in fp16.
        in_backward: whether `distwrap.backward` runs, so that the gradients of this moment are scaled.
        models: in fp16.
        on_skipped: called with an optimizer whose step was skipped, because a gradient overflowed.
    """

    def __init__(self, world: World) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.in_backward = False
        self.models: WeakSet[nn.Module] = WeakSet()
        self._others: WeakSet[nn.Module] = WeakSet()  # wrapped in another precision
        self.on_skipped: list[Callable[[Optimizer], None]] = []
        self._world = world
        self._states: WeakKeyDictionary[Optimizer, ScaleState] = WeakKeyDictionary()
        # Scaled gradients, by the ids of their parameters, as the last backward has left them.
        self._scaled: dict[int, tuple[torch.Tensor, int]] = {}
        self._has_scaled = self._user_scales = False

    def add(self, model: nn.Module, scaler: torch.amp.GradScaler | None) -> None:
        """Note a model that was wrapped; in fp16 with a scaler, of which the first one is that of all models."""
        (self._others if scaler is None else self.models).add(model)
        if scaler is not None and self.scaler is None:
            self.scaler = scaler
            self._world.part(OptimizerSteps).listen(Phase.REFUSE, self._refuse_own_step)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Note within a ``with``, around a backward of a scaled loss, which gradients it makes or adds to."""
        if not self._has_scaled:
            self._states.update(dict.fromkeys(instances(Optimizer), ScaleState.READY))
            self._has_scaled = True
        self.update()
        before = self._gradients()
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            after = self._gradients()
            self._scaled = {
                key: now
                for key, now in after.items()
                if not _is_same(now, before.get(key)) or _is_same(now, self._scaled.get(key))
            }
            for optimizer in self._states:
                if any(id(parameter) in self._scaled for parameter in _parameters(optimizer)):
                    self._states[optimizer] = ScaleState.SCALED

    def state_of(self, optimizer: Optimizer) -> ScaleState:
        """Return the state of an optimizer's gradients.

        Raises:
            PrecisionError: the optimizer was made after a backward, and holds tensors with gradients that are in no
                wrapped model.
        """
        state = self._states.get(optimizer)
        if state is None:
            gradients = _gradients(_parameters(optimizer))
            if self._has_scaled and not gradients.keys() <= self._of_models(self.models | self._others).keys():
                raise PrecisionError(
                    f"rank {self._world.placement.rank}: this {type(optimizer).__name__} was made after "
                    "distwrap.backward(loss) under precision='fp16', and holds tensors of no wrapped model, so that it "
                    "is not known whether their gradients are scaled. Make it before the first backward."
                )
            state = ScaleState.SCALED if gradients.keys() & self._scaled.keys() else ScaleState.READY
            self._states[optimizer] = state
        if state is ScaleState.SCALED and not (self.trains_models(optimizer) or self._intact(optimizer)):
            state = ScaleState.READY  # a plain backward has made others since
        return state

    def trains_models(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of models in fp16."""
        return not self._of_models(self.models).keys().isdisjoint(map(id, _parameters(optimizer)))

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer.

        Raises:
            PrecisionError: they were changed while they were scaled.
        """
        assert self.scaler is not None
        self._refuse_changed(optimizer)
        if any(parameter.grad is not None for parameter in _parameters(optimizer)):
            self.scaler.unscale_(optimizer)
            self._states[optimizer] = ScaleState.UNSCALED
        else:
            self._states[optimizer] = ScaleState.READY

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps over its gradients, or skips them, since they have overflowed."""
        if self._states.get(optimizer) is ScaleState.UNSCALED:
            self._states[optimizer] = ScaleState.STEPPED

    def update(self) -> None:
        """Update the scale, if gradients were unscaled by it. Scaled gradients of other optimizers follow it."""
        done = [each for each, state in self._states.items() if state in (ScaleState.UNSCALED, ScaleState.STEPPED)]
        if self.scaler is None or not done:
            return
        accumulated = [tensor for each in set(self._states) - set(done) for tensor in self._intact(each)]
        before = self.scaler.get_scale() if accumulated else 1.0
        self.scaler.update()
        self._states.update(dict.fromkeys(done, ScaleState.READY))
        factor = self.scaler.get_scale() / before if accumulated else 1.0
        for parameter in accumulated if factor != 1.0 else ():
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.grad.mul_(factor)
            self._scaled[id(parameter)] = parameter.grad, version_of(parameter.grad)

    def forget(self) -> None:
        """Forget all gradients, as a checkpoint is loaded."""
        self._states.update(dict.fromkeys(self._states, ScaleState.READY))
        self._scaled.clear()

    def sees_users_scaler(self) -> bool:
        """Look, until there is one, for a `GradScaler` of the user's that has scaled something."""
        self._user_scales = self._user_scales or any(
            scaler is not self.scaler and scaler.is_enabled() and has_scaled(scaler)
            for scaler in instances(torch.amp.GradScaler)
        )
        return self._user_scales

    def _of_models(self, models: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
        return {id(parameter): parameter for model in models for parameter in model.parameters()}

    def _gradients(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Return the gradients of wrapped models and of all optimizers that were seen, with their versions."""
        held = {id(parameter): parameter for optimizer in self._states for parameter in _parameters(optimizer)}
        return _gradients({**held, **self._of_models(self.models | self._others)}.values())

    def _intact(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return the parameters of an optimizer whose gradients are scaled, and were not changed since."""
        held = _gradients(_parameters(optimizer))
        return [
            parameter
            for parameter in _parameters(optimizer)
            if (now := held.get(id(parameter))) is not None and _is_same(now, self._scaled.get(id(parameter)))
        ]

    def _refuse_changed(self, optimizer: Optimizer) -> None:
        """Raise where a scaled gradient was changed; zero has no scale."""
        for parameter in _parameters(optimizer):
            scaled, now = self._scaled.pop(id(parameter), None), parameter.grad  # so that zero_grad() frees it
            if scaled is None or now is None or _is_same((now, version_of(now)), scaled):
                continue
            if now.is_sparse or now.any():
                models = (model.named_parameters() for model in self.models)
                name = next((name for named in models for name, each in named if each is parameter), "")
                raise PrecisionError(
                    f"rank {self._world.placement.rank}: the gradients were changed between backward(loss) "
                    f"and optimizer_step() under precision='fp16' (that of {name!r}, for example), where they "
                    "are still scaled: clipping would reduce them to almost nothing (DW105). "
                    "Use optimizer_step(optimizer, max_norm=...), or call distwrap.unscale(optimizer) before you "
                    "touch them."
                )

    def _refuse_own_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse an optimizer's own step over gradients that are scaled, or may have overflowed."""
        state = self.state_of(optimizer)
        if state is ScaleState.SCALED and self._intact(optimizer):
            raise PrecisionError(
                "optimizer.step() after distwrap.backward(loss) under precision='fp16': the gradients are still "
                "scaled, so the step would be thousands of times too long. Call distwrap.optimizer_step(optimizer) "
                "instead."
            )
        if state is ScaleState.UNSCALED:
            raise PrecisionError(
                "optimizer.step() after distwrap.unscale(optimizer) under precision='fp16': gradients that have "
                "overflowed would make the weights infinite. Call distwrap.optimizer_step(optimizer) instead, which "
                "skips them."
            )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, int]]:
    return {
        id(parameter): (gradient, version_of(gradient))
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    }


def _is_same(now: tuple[torch.Tensor, int], then: tuple[torch.Tensor, int] | None) -> bool:
    return then is not None and now[0] is then[0] and now[1] == then[1]
