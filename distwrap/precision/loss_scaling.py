"""Loss scaling of a run: the scale, and for each optimizer whether its gradients are scaled."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap import simulated
from distwrap._internals.torch import has_scaled, here, version_of
from distwrap.errors import PrecisionError
from distwrap.group.optimizer_steps import Closure, OptimizerSteps, Phase, around_closure
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
        # Scaled gradients by the ids of their parameters, with their versions as a scaled backward has left them.
        self._scaled: dict[int, tuple[torch.Tensor, int]] = {}
        # Of those, the sums of scaled gradients and others, each with whether these others were not zero.
        self._mixed: dict[int, bool | torch.Tensor] = {}
        self._has_scaled = self._is_due = self._user_scales = False

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
            if simulated.running is None:  # else those of other ranks are among them
                self._states.update(dict.fromkeys(instances(Optimizer), ScaleState.READY))
            self._has_scaled = True
        self.update()
        known = self._known()
        before = _gradients(known)
        self._scaled = {key: each for key, each in self._scaled.items() if each[0] is before.get(key, (None,))[0]}
        others = {
            key: _has_numbers(gradient)
            for key, (gradient, _) in before.items()
            if key not in self._scaled or key in self._mixed
        }
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            new = {key: now for key, now in _gradients(known).items() if not _is_same(now, before.get(key))}
            self._scaled.update(new)
            for optimizer in self._states:
                if any(id(parameter) in new for parameter in _parameters(optimizer)):
                    self._states[optimizer] = ScaleState.SCALED
            # A discriminator's gradients may be such a sum until its own zero_grad().
            still = {key: flag for key, flag in self._mixed.items() if key in self._scaled and key not in new}
            self._mixed = {**still, **{key: others[key] for key in new if key in others}}

    def state_of(self, optimizer: Optimizer, *, is_own: bool = False) -> ScaleState:
        """Return the state of an optimizer's gradients.

        Args:
            optimizer: any.
            is_own: whether it is about to make a step of its own, which is one over plain gradients if it is first seen
                now, and no scaled ones are there.

        Raises:
            PrecisionError: the optimizer was made after a backward, and holds tensors with gradients that are in no
                wrapped model.
        """
        state = self._states.get(optimizer)
        if state is None:
            gradients = _gradients(_parameters(optimizer))
            known = _of_models(self.models | self._others)
            pending = any(each.grad is self._scaled[key][0] for key, each in known.items() if key in self._scaled)
            if self._has_scaled and not gradients.keys() <= known.keys() and (pending or not is_own):
                raise PrecisionError(
                    f"rank {self._world.placement.rank}: this {type(optimizer).__name__} was made after "
                    "distwrap.backward(loss) under precision='fp16', and holds tensors of no wrapped model, so that it "
                    "is not known whether their gradients are scaled. Make it before the first backward."
                )
            state = ScaleState.SCALED if gradients.keys() & self._scaled.keys() else ScaleState.READY
            self._states[optimizer] = state
        if state is ScaleState.SCALED and not self._holds_scaled(optimizer):
            state = ScaleState.READY  # zero_grad() has removed them, or a plain backward has made others since
            for parameter in _parameters(optimizer):
                self._scaled.pop(id(parameter), None)
        return state

    def must_be_scaled(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds gradients of models in fp16, or parameters, before the first backward."""
        known = _of_models(self.models)
        held = [each.grad for each in _parameters(optimizer) if id(each) in known]
        return any(not self._has_scaled or (each is not None and bool(_has_numbers(each))) for each in held)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer.

        Raises:
            PrecisionError: some are not scaled, or were changed while they were scaled.
        """
        assert self.scaler is not None
        self._refuse_changed(optimizer)
        self.scaler.unscale_(optimizer)
        self._states[optimizer], self._is_due = ScaleState.UNSCALED, True

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps over its gradients, or skips them, since they have overflowed."""
        if self._states.get(optimizer) is ScaleState.UNSCALED:
            self._states[optimizer] = ScaleState.STEPPED

    def update(self) -> None:
        """Update the scale, if gradients were unscaled by it. Those that are scaled still follow it."""
        if self.scaler is None or not self._is_due:
            return
        self._is_due = False
        before = self.scaler.get_scale() if self._scaled else 1.0
        self.scaler.update()
        factor = self.scaler.get_scale() / before if self._scaled else 1.0
        for key, (gradient, version) in self._scaled.items() if factor != 1.0 else ():
            if version_of(here(gradient)) == version:
                with torch.no_grad():
                    gradient.mul_(factor)
                self._scaled[key] = gradient, version_of(here(gradient))
        for optimizer, state in self._states.items():
            if state is ScaleState.STEPPED:
                self._states[optimizer] = ScaleState.READY

    def forget(self) -> None:
        """Forget all gradients, as a checkpoint is loaded."""
        self._states.update(dict.fromkeys(self._states, ScaleState.READY))
        self._scaled.clear()
        self._mixed.clear()
        self._is_due = False

    def sees_users_scaler(self) -> bool:
        """Look, until there is one, for a `GradScaler` of the user's that has scaled something."""
        self._user_scales = self._user_scales or any(
            scaler is not self.scaler and scaler.is_enabled() and has_scaled(scaler)
            for scaler in instances(torch.amp.GradScaler)
        )
        return self._user_scales

    def _known(self) -> list[torch.Tensor]:
        """Return the parameters of wrapped models and of all optimizers that were seen."""
        held = {id(parameter): parameter for optimizer in self._states for parameter in _parameters(optimizer)}
        return list({**held, **_of_models(self.models | self._others)}.values())

    def _holds_scaled(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds gradients that are scaled, whatever was done to them since."""
        known = _of_models(self.models)  # whose plain backward is refused
        return any(
            each.grad is not None
            and (id(each) in known or each.grad is self._scaled.get(id(each), (None,))[0])
            and bool(_has_numbers(each.grad))
            for each in _parameters(optimizer)
        )

    def _refuse_changed(self, optimizer: Optimizer) -> None:
        """Raise where a gradient is not what a scaled backward has left; zero has no scale."""
        for parameter in _parameters(optimizer):
            scaled, now = self._scaled.pop(id(parameter), None), parameter.grad  # so that zero_grad() frees it
            mixed = bool(self._mixed.pop(id(parameter), False))
            is_changed = now is not None and not _is_same((now, version_of(here(now))), scaled)
            if now is None or not (mixed or is_changed) or not _has_numbers(now):
                continue
            if mixed:
                raise PrecisionError(
                    f"rank {self._world.placement.rank}: under precision='fp16' scaled gradients were added to those "
                    f"of the last step (of {self._name(id(parameter))!r}, for example), which are not scaled: their "
                    "sum is of no use. Call optimizer.zero_grad() after each step, or before the next backward."
                )
            raise PrecisionError(
                f"rank {self._world.placement.rank}: the gradients were changed between backward(loss) and "
                f"optimizer_step() under precision='fp16' (that of {self._name(id(parameter))!r}, for example), "
                "where they are still scaled: clipping would reduce them to almost nothing (DW105). Use "
                "optimizer_step(optimizer, max_norm=...), or distwrap.unscale(optimizer) before you touch them."
            )

    def _name(self, key: int) -> str:
        named = (model.named_parameters() for model in self.models | self._others)
        return next((name for names in named for name, each in names if id(each) == key), "a tensor")

    def _refuse_own_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Refuse an optimizer's own step over gradients that are scaled, or may have overflowed; also of a closure."""
        self._refuse_step(optimizer)

        def checked(closure: Closure) -> Closure:
            def call() -> Any:
                loss = closure()
                self._refuse_step(optimizer)
                return loss

            return call

        return around_closure(args, kwargs, checked)

    def _refuse_step(self, optimizer: Optimizer) -> None:
        state = self.state_of(optimizer, is_own=True)
        if state is ScaleState.SCALED:
            raise PrecisionError(
                "optimizer.step() after distwrap.backward(loss) under precision='fp16': the gradients are still "
                "scaled, so the step would be thousands of times too long. Call distwrap.optimizer_step(optimizer) "
                "instead."
            )
        if state is ScaleState.UNSCALED and any(each.grad is not None for each in _parameters(optimizer)):
            raise PrecisionError(
                "optimizer.step() after distwrap.unscale(optimizer) under precision='fp16': gradients that have "
                "overflowed would make the weights infinite. Call distwrap.optimizer_step(optimizer) instead, which "
                "skips them."
            )


def _of_models(models: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    return {id(parameter): parameter for model in models for parameter in model.parameters()}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, int]]:
    return {
        id(parameter): (gradient, version_of(here(gradient)))
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    }


def _has_numbers(gradient: torch.Tensor) -> bool | torch.Tensor:
    """Return whether a gradient, of which this rank may have a part, is not zero; a tensor, for which nobody waits."""
    return True if gradient.is_sparse else here(gradient).any()


def _is_same(now: tuple[torch.Tensor, int], then: tuple[torch.Tensor, int] | None) -> bool:
    return then is not None and now[0] is then[0] and now[1] == then[1]
