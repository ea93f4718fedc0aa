"""Adam whose ranks exchange only the momentum, in 8 bits or 1 bit.

Source: https://arxiv.org/abs/2102.02888, algorithm 1. Four defects of Bagua's ``QAdamAlgorithm`` are avoided: the bias
correction kept growing after the variance was frozen; weight decay ended with the warm-up; all groups used the betas of
the first; there was no error feedback.

A momentum is encoded divided by the frozen denominator, as a movement of its weight. Otherwise the codec's error in a
block would be divided by the tiny denominator of a weight that rarely has a gradient. The variance of such a weight was
frozen too early: when its gradients come, the momentum is a thousand times the denominator. It is clamped to what
Adam's own variance would allow (https://arxiv.org/abs/1412.6980, section 2.1). Without the clamp, one such weight makes
the codes of its block so coarse that the loss becomes NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch.optim import Adam, AdamW, Optimizer

from distwrap._internals.torch import foreach
from distwrap.checks import Check, whole
from distwrap.comm.base import Averager, Bucket, Link, option
from distwrap.comm.compressed import Codec, CompressedMean, MinMax8, Sign
from distwrap.comm.gradients import GradientAlgorithm
from distwrap.errors import ModelError, OptionError
from distwrap.group.optimizer_steps import Closure, OptimizerSteps, Phase, around_closure, steps_as_torch
from distwrap.group.world import RunPart, World, current_world, say
from distwrap.precision import LossScaling

_STEPS = "qadam_steps"  # a key of parameter groups, which are saved with the optimizer's state


@dataclass(frozen=True, kw_only=True)
class QAdam(GradientAlgorithm):
    """Plain Adam during the warm-up, then a frozen variance and the mean of momenta in few bits.

    Pass the optimizer, ``Adam`` or ``AdamW``, to `wrap_optimizer`. In one process it stays plain Adam.

    Args:
        warmup_steps: steps of plain Adam with full gradients, until the variance is stable; some 20 % of all steps.
        bits: 8, for a quarter of the bytes; or 1, for a thirty-second, always with error feedback.
        error_feedback: whether errors of the 8-bit codec are added to the next step.
    """

    needs_optimizer_state: ClassVar[bool] = True

    warmup_steps: int = option(100, whole(1))
    bits: int = option(8, Check("8, for 8 bits a number, or 1", lambda bits: bits in (1, 8)))
    error_feedback: bool = True

    def codec(self) -> Codec:
        """Return the codec of the momenta."""
        return Sign() if self.bits == 1 else MinMax8()

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _Momenta(link, self)

    def prepare_optimizer(self, optimizer: Optimizer, averager: Averager | None) -> Optimizer:
        current_world().part(_FrozenSteps).add(optimizer, self.warmup_steps)
        if isinstance(averager, _Momenta):
            averager.serve(optimizer)
        return optimizer


class _Momenta(Averager):
    """Averager of gradients during the warm-up, and of momenta afterwards.

    A mean of momenta is returned as the gradients with which Adam's momentum becomes that mean, so that further
    backwards before a step, scalers and clipping meet gradients as ever.
    """

    wants_scale = True

    def __init__(self, link: Link, options: QAdam) -> None:
        self._link, self._warmup = link, options.warmup_steps
        self._scaling = current_world().part(LossScaling)
        self._mean = CompressedMean(link, options.codec(), feedback=options.error_feedback or options.bits == 1)
        self._place_of: dict[int, tuple[Optimizer, int]] = {}  # load_state_dict() replaces an optimizer's groups

    def serve(self, optimizer: Optimizer) -> None:
        """Note the optimizer whose momenta are averaged."""
        for index, group in enumerate(optimizer.param_groups):
            self._place_of.update({id(parameter): (optimizer, index) for parameter in group["params"]})

    def average(self, bucket: Bucket) -> None:
        places = [self._find(parameter) for parameter in bucket.parameters]
        frozen = [_steps_of(optimizer, group) >= self._warmup for optimizer, group in places]
        if not any(frozen):
            self._link.mean(bucket.values)
            return
        if not all(frozen):
            raise ModelError(
                "comm='qadam': this model has two optimizers, and only one of them has finished its warm-up. "
                "Step both equally often, or wrap the part of the model that each one trains by itself."
            )
        if self._must_scale and not self._scaling.in_backward:
            raise ModelError(
                "comm='qadam' must know by how much the gradients are scaled, and a GradScaler of the loop's own does "
                "not say: take precision='fp16', distwrap.backward(loss) and distwrap.optimizer_step(optimizer)."
            )
        states = [
            _frozen_state(optimizer, parameter, group, self._warmup)
            for parameter, (optimizer, group) in zip(bucket.parameters, places, strict=True)
        ]
        denominators = [state["denominator"] for state in states]
        parts = list(zip(bucket.parameters, bucket.views, states, places, strict=True))
        for parameter, gradient, state, (optimizer, group) in parts:
            beta, decay = group["betas"][0], _coupled_decay(optimizer, group)
            gradient.add_(parameter.detach(), alpha=decay * bucket.scale)
            gradient.mul_(1 - beta).add_(state["exp_avg"], alpha=beta * bucket.scale)
        foreach("div_", bucket.views, denominators)
        bucket.values.nan_to_num_(nan=math.nan, posinf=math.nan, neginf=math.nan)  # the clamp would hide an overflow
        for _, momentum, _, (_, group) in parts:
            limit = bucket.scale * _largest_momentum(group)
            momentum.clamp_(-limit, limit)
        self._mean.average(bucket)
        foreach("mul_", bucket.views, denominators)
        for parameter, momentum, state, (optimizer, group) in parts:
            beta, decay = group["betas"][0], _coupled_decay(optimizer, group)
            momentum.sub_(state["exp_avg"], alpha=beta * bucket.scale).div_(1 - beta)
            momentum.sub_(parameter.detach(), alpha=decay * bucket.scale)

    @cached_property
    def _must_scale(self) -> bool:
        """Whether losses are scaled, as seen when the warm-up ends."""
        return self._scaling.scaler is not None or self._scaling.sees_users_scaler()

    def _find(self, parameter: torch.Tensor) -> tuple[Optimizer, dict[str, Any]]:
        """Return the optimizer of a parameter, and its group."""
        if id(parameter) not in self._place_of:
            raise ModelError(
                "comm='qadam' exchanges Adam's momentum, and it does not know the optimizer of this parameter. "
                "Write optimizer = wrap_optimizer(torch.optim.Adam(model.parameters()), model), before the "
                "first backward. In a strategy of your own, prepare_optimizer() must call super()."
            )
        optimizer, index = self._place_of[id(parameter)]
        return optimizer, optimizer.param_groups[index]


class _FrozenSteps(RunPart):
    """Steps with a frozen variance, which the run's optimizers take after their warm-up in place of Adam's.

    Such a step is lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵀ) + ε), with v of the T-th step, and at most as long as Adam's
    longest, lr · max(1, (1 - β₁) / √(1 - β₂)). Weights without a gradient until then, whose v is 0, are no longer
    trained, since their momentum is noise of the codec. Adam itself gets no gradients, and so does nothing.
    """

    def __init__(self, world: World) -> None:
        self._warmups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        steps = world.part(OptimizerSteps)
        steps.listen(Phase.HIDE, self._before_step)
        steps.listen(Phase.SHOW, self._after_step)

    def add(self, adam: Optimizer, warmup: int) -> None:
        """Take the steps of an optimizer after its warm-up.

        Raises:
            OptionError: the optimizer is not Adam, or has options that are not in the formula.
        """
        if not isinstance(adam, (Adam, AdamW)) or not steps_as_torch(adam):
            its = ", whose step is its own" if isinstance(adam, Adam) else ""
            raise OptionError(f"comm='qadam' needs torch.optim.Adam or AdamW, not {type(adam).__name__}{its}.")
        for name in ("amsgrad", "maximize", "differentiable"):
            if any(group.get(name) for group in adam.param_groups):
                raise OptionError(f"comm='qadam' takes no {type(adam).__name__}({name}=True).")
        if any(parameter.is_complex() for group in adam.param_groups for parameter in group["params"]):
            raise OptionError("comm='qadam' takes no complex parameters; comm='allreduce' and comm='local_sgd' do.")
        self._warmups[adam] = warmup

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if optimizer not in self._warmups:
            return None

        def with_step(closure: Closure) -> Closure:
            def call() -> Any:
                loss = closure()
                self._step(optimizer)
                return loss

            return call

        replaced = around_closure(args, kwargs, with_step)
        if replaced is None:
            self._step(optimizer)
        return replaced

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._warmups:
            while self._hidden:
                parameter, gradient = self._hidden.pop()
                parameter.grad = gradient
            for group in optimizer.param_groups:
                group[_STEPS] += 1

    @torch.no_grad()
    def _step(self, optimizer: Optimizer) -> None:
        warmup = self._warmups[optimizer]
        for group in optimizer.param_groups:
            if (done := _steps_of(optimizer, group)) < warmup:
                continue
            held = [(each, each.grad) for each in group["params"] if each.grad is not None]
            if not held:
                continue
            parameters, gradients = map(list, zip(*held, strict=True))
            states = [_frozen_state(optimizer, each, group, warmup) for each in parameters]
            momenta, beta, lr = [state["exp_avg"] for state in states], group["betas"][0], float(group["lr"])
            coupled = _coupled_decay(optimizer, group)
            foreach("mul_", momenta, beta)
            foreach("add_", momenta, gradients, alpha=1 - beta)
            foreach("add_", momenta, parameters, alpha=(1 - beta) * coupled)
            foreach("mul_", parameters, 1 - lr * (group["weight_decay"] - coupled))
            for momentum, state in zip(momenta, states, strict=True):
                momentum.masked_fill_(state["exp_avg_sq"] == 0, 0.0)
                state["step"] += 1
            denominators = [state["denominator"] for state in states]
            foreach("addcdiv_", parameters, momenta, denominators, value=-lr / (1 - beta ** (done + 1)))
            self._hidden += held
            for parameter in parameters:
                parameter.grad = None
            if done == warmup:
                _print_left_out(optimizer, group, warmup)


def _steps_of(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return the number of steps of a group, with those of plain Adam."""
    if _STEPS not in group:
        states = (optimizer.state.get(parameter, {}) for parameter in group["params"])
        group[_STEPS] = max((int(state["step"]) for state in states if "step" in state), default=0)
    return int(group[_STEPS])


def _coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the weight decay that is part of a group's gradients, as that of Adam is without an option."""
    is_apart = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
    return 0.0 if is_apart else float(group["weight_decay"])


def _frozen_state(optimizer: Optimizer, parameter: torch.Tensor, group: dict[str, Any], warmup: int) -> dict[str, Any]:
    """Return the state of a parameter, with the denominator √v / √(1 - β₂ᵀ) + ε at the end of the warm-up."""
    state: dict[str, Any] = optimizer.state[parameter]
    if "denominator" not in state:
        if "step" not in state:  # the parameter had no gradient yet
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        correction = (1 - group["betas"][1] ** warmup) ** 0.5
        state["denominator"] = state["exp_avg_sq"].sqrt().div_(correction).add_(group["eps"])
    return state


def _largest_momentum(group: dict[str, Any]) -> float:
    """Return the limit of m / (√v / √(1 - β₂ᵀ) + ε), with which a step is as long as Adam's longest."""
    beta1, beta2 = group["betas"]
    return float(max(1.0, (1 - beta1) / (1 - beta2) ** 0.5) * (1 - beta1 ** (group[_STEPS] + 1)))


def _print_left_out(optimizer: Optimizer, group: dict[str, Any], warmup: int) -> None:
    weights = left_out = 0
    for parameter in group["params"]:
        variance = optimizer.state.get(parameter, {}).get("exp_avg_sq")
        weights += parameter.numel()
        left_out += parameter.numel() if variance is None else int((variance == 0).sum())
    if left_out:
        say(
            f"comm='qadam': the variance is frozen after {warmup} steps, in which {left_out:,} of "
            f"{weights:,} weights had no gradient. These weights are not trained any more. If they should "
            "be, give a longer warm-up, by warmup_steps=."
        )
