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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakMethod, ref

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Adam, AdamW, Optimizer

from distwrap._internals.torch import act_for, after_backward, current_backward, foreach
from distwrap.checks import Check, whole
from distwrap.comm.base import Averager, Bucket, option
from distwrap.comm.codecs import Codec, MinMax8, Sign
from distwrap.comm.compressed import CompressedMean
from distwrap.comm.gradients import GradientAlgorithm, GradientExchange
from distwrap.comm.link import Link
from distwrap.errors import ModelError, OptionError
from distwrap.group.optimizer_steps import steps_as_torch
from distwrap.group.world import World, current_world, say
from distwrap.model.distributed import DistributedModel
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

    def attach(self, model: DistributedModel, world: World) -> GradientExchange:
        return _QAdamExchange(self, model, world)

    def prepare_optimizer(self, optimizer: Optimizer, averager: Averager | None) -> Optimizer:
        if not isinstance(optimizer, QAdamOptimizer):
            optimizer = QAdamOptimizer(optimizer, self.warmup_steps)
        if isinstance(averager, _Momenta):
            averager.serve(optimizer)
        return optimizer


class _QAdamExchange(GradientExchange):
    """Exchange in which a backward may add to the average of an earlier one in the same step.

    After the warm-up this average is a momentum, which is turned back into a gradient before the addition.
    """

    def __init__(self, algorithm: QAdam, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        self._warmup, self._averages = algorithm.warmup_steps, 0
        self._before: dict[int, tuple[int, int]] = {}  # averages and steps at a parameter's last gradient
        self._handles: list[Any] = []

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        prepared = super().prepare_optimizer(optimizer)
        assert isinstance(prepared, QAdamOptimizer)
        hook = WeakMethod(self._add)

        def listen(index: int, parameter: torch.Tensor) -> Any:
            held = ref(parameter)
            return parameter.register_hook(lambda gradient: (add := hook()) and add(prepared, index, held()))  # type: ignore[no-untyped-call]

        for index, group in enumerate(prepared.param_groups):
            own = (each for each in group["params"] if id(each) in self._names)  # of another model they differ
            self._handles += [listen(index, parameter) for parameter in own if parameter.requires_grad]
        return prepared

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0 and current_backward() != -1:
            after_backward(self._count)
        return super().average(bucket)

    def _count(self) -> None:
        self._averages += 1

    @torch.no_grad()
    def _add(self, optimizer: QAdamOptimizer, index: int, parameter: Any) -> None:
        """Prepare ``.grad`` for the addition of a gradient; runs in a backward, just before the addition."""
        group = optimizer.param_groups[index]
        steps, content = optimizer.steps_of(group), parameter.grad
        averages, then = self._before.get(id(parameter), (self._averages, steps))
        self._before[id(parameter)] = self._averages, steps
        if content is None or averages == self._averages or then < self._warmup or not content.any():
            return
        if then != steps:
            raise ModelError(
                "comm='qadam' turns gradients into momenta, which are still in .grad after the optimizer's "
                "step, so that the next gradients would be added to them. Call optimizer.zero_grad() after each step."
            )
        scale = self._scaling.scaler.get_scale() if self._scaling.scaler is not None else 1.0
        beta, decay = group["betas"][0], 0.0 if optimizer.decouples(group) else group["weight_decay"]
        content.sub_(optimizer.state[parameter]["exp_avg"], alpha=beta * scale).div_(1 - beta)
        content.sub_(parameter.detach(), alpha=decay * scale)

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        super().close()


class _Momenta(Averager):
    wants_scale = True

    def __init__(self, link: Link, options: QAdam) -> None:
        self._link, self._options = link, options
        self._scaling = current_world().part(LossScaling)
        self._mean = CompressedMean(link, options.codec(), feedback=options.error_feedback or options.bits == 1)
        self._place_of: dict[int, tuple[QAdamOptimizer, int]] = {}  # load_state_dict() replaces an optimizer's groups

    def serve(self, optimizer: QAdamOptimizer) -> None:
        """Note an optimizer, whose gradients become momenta after the warm-up."""
        for index, group in enumerate(optimizer.param_groups):
            self._place_of.update({id(parameter): (optimizer, index) for parameter in group["params"]})

    def average(self, bucket: Bucket) -> None:
        places = [self._find(parameter) for parameter in bucket.parameters]
        frozen = [optimizer.steps_of(group) >= self._options.warmup_steps for optimizer, group in places]
        if not any(frozen):
            self._link.mean(bucket.values)
            return
        if not all(frozen):
            raise ModelError(
                "comm='qadam': this model has two optimizers, and only one of them has finished its warm-up. "
                "Step both equally often, or wrap the part of the model that each one trains by itself."
            )
        if self._scaling.scaler is not None and not self._scaling.in_backward:
            raise ModelError(
                "comm='qadam' under precision='fp16' must know by how much the gradients are scaled, and a GradScaler "
                "of the loop's own does not say: call distwrap.backward(loss) and distwrap.optimizer_step(optimizer)."
            )
        denominators, limits = [], []
        for parameter, gradient, (optimizer, group) in zip(bucket.parameters, bucket.views, places, strict=True):
            state, beta = optimizer.frozen_state(parameter, group), group["betas"][0]
            if group["weight_decay"] and not optimizer.decouples(group):
                gradient.add_(parameter.detach(), alpha=group["weight_decay"] * bucket.scale)
            gradient.mul_(1 - beta).add_(state["exp_avg"], alpha=beta * bucket.scale)
            denominators.append(state["denominator"])
            limits.append(bucket.scale * optimizer.largest_momentum(group))
        foreach("div_", bucket.views, denominators)
        bucket.values.nan_to_num_(nan=math.nan, posinf=math.nan, neginf=math.nan)  # the clamp would hide an overflow
        for view, limit in zip(bucket.views, limits, strict=True):
            view.clamp_(-limit, limit)
        self._mean.average(bucket)
        foreach("mul_", bucket.views, denominators)

    def _find(self, parameter: torch.Tensor) -> tuple[QAdamOptimizer, dict[str, Any]]:
        """Return the optimizer of a parameter, and its group."""
        if id(parameter) not in self._place_of:
            raise ModelError(
                "comm='qadam' exchanges Adam's momentum, and it does not know the optimizer of this parameter. "
                "Write optimizer = wrap_optimizer(torch.optim.Adam(model.parameters()), model), before the "
                "first backward. In a strategy of your own, prepare_optimizer() must call super()."
            )
        optimizer, index = self._place_of[id(parameter)]
        return optimizer, optimizer.param_groups[index]


class QAdamOptimizer(Optimizer):
    """Adam whose variance is frozen after `warmup_steps`, when gradients are averaged momenta.

    It shares parameter groups, state and step hooks with the original optimizer, so that its schedulers act. After the
    warm-up a step is lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵀ) + ε), with v of the T-th step, and at most as long as Adam's
    longest, lr · max(1, (1 - β₁) / √(1 - β₂)). Weights without a gradient until then, whose v is 0, are no longer
    trained, since their momentum is noise of the codec.

    Raises:
        OptionError: the optimizer is not Adam, or has options that are not in the formula.
    """

    def __init__(self, adam: Optimizer, warmup_steps: int) -> None:
        if not isinstance(adam, (Adam, AdamW)) or not steps_as_torch(adam):
            its = ", whose step is its own" if isinstance(adam, Adam) else ""
            raise OptionError(f"comm='qadam' needs torch.optim.Adam or AdamW, not {type(adam).__name__}{its}.")
        for name in ("amsgrad", "maximize", "differentiable"):
            if any(group.get(name) for group in adam.param_groups):
                raise OptionError(f"comm='qadam' takes no {type(adam).__name__}({name}=True).")
        if any(parameter.is_complex() for group in adam.param_groups for parameter in group["params"]):
            raise OptionError("comm='qadam' takes no complex parameters; comm='allreduce' and comm='local_sgd' do.")
        self._is_adamw, self._warmup = isinstance(adam, AdamW), warmup_steps
        super().__init__(adam.param_groups, adam.defaults)
        self._adam = adam
        self._share()
        act_for(self, adam)
        adam.register_load_state_dict_post_hook(lambda _: self._share())
        adam.register_step_pre_hook(self._refuse_original)

    def decouples(self, group: dict[str, Any]) -> bool:
        """Return whether a group's weight decay is apart from its gradients, as AdamW's and as Adam's by an option."""
        return bool(group.get("decoupled_weight_decay", self._is_adamw))

    def _refuse_original(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._adam:  # whose hooks are those of this optimizer too
            raise ModelError(
                "comm='qadam' steps with the optimizer that wrap_optimizer() has returned, and this is a step of the "
                f"{type(optimizer).__name__} that it was given. Write optimizer = wrap_optimizer(optimizer, model)."
            )

    def _share(self) -> None:
        self.param_groups, self.state = self._adam.param_groups, self._adam.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also into the original optimizer."""
        self._adam.load_state_dict(state_dict)

    def steps_of(self, group: dict[str, Any]) -> int:
        """Return the number of steps of a group, with those of plain Adam."""
        if _STEPS not in group:
            states = (self.state.get(parameter, {}) for parameter in group["params"])
            group[_STEPS] = max((int(state["step"]) for state in states if "step" in state), default=0)
        return int(group[_STEPS])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step as Adam does, or with the frozen variance."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients: Any = [parameter.grad for parameter in parameters]
        states = [self._state_of(parameter) for parameter in parameters]
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        lr = float(group["lr"])
        momenta = [state["exp_avg"] for state in states]
        variances = [state["exp_avg_sq"] for state in states]
        step = self.steps_of(group) + 1
        group[_STEPS] = step
        if not parameters:
            return
        if decay and self.decouples(group):
            foreach("mul_", parameters, 1 - lr * decay)
        if step > self._warmup:
            foreach("copy_", momenta, gradients)
            for momentum, variance in zip(momenta, variances, strict=True):
                momentum.masked_fill_(variance == 0, 0.0)
            denominators = [self.frozen_state(parameter, group)["denominator"] for parameter in parameters]
            if step == self._warmup + 1:
                self._print_left_out(group)
        else:
            if decay and not self.decouples(group):
                gradients = foreach("add", gradients, parameters, alpha=decay)
            foreach("lerp_", momenta, gradients, 1 - beta1)
            foreach("mul_", variances, beta2)
            foreach("addcmul_", variances, gradients, gradients, value=1 - beta2)
            denominators = self._denominators(variances, group, step)
        for state in states:
            state["step"] += 1
        foreach("addcdiv_", parameters, momenta, denominators, value=-lr / (1 - beta1**step))

    def frozen_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, with the denominator √v / √(1 - β₂ᵀ) + ε at the end of the warm-up."""
        state = self._state_of(parameter)
        if "denominator" not in state:
            state["denominator"] = self._denominators([state["exp_avg_sq"]], group, self._warmup)[0]
        return state

    def largest_momentum(self, group: dict[str, Any]) -> float:
        """Return the limit of m / (√v / √(1 - β₂ᵀ) + ε), with which a step is as long as Adam's longest."""
        beta1, beta2 = group["betas"]
        step = self.steps_of(group) + 1
        return float(max(1.0, (1 - beta1) / (1 - beta2) ** 0.5) * (1 - beta1**step))

    def _denominators(self, variances: list[torch.Tensor], group: dict[str, Any], step: int) -> list[torch.Tensor]:
        denominators = foreach("sqrt", variances)
        foreach("div_", denominators, (1 - group["betas"][1] ** step) ** 0.5)
        foreach("add_", denominators, group["eps"])
        return list(denominators)

    def _print_left_out(self, group: dict[str, Any]) -> None:
        weights = left_out = 0
        for parameter in group["params"]:
            variance = self.state.get(parameter, {}).get("exp_avg_sq")
            weights += parameter.numel()
            left_out += parameter.numel() if variance is None else int((variance == 0).sum())
        if left_out:
            say(
                f"comm='qadam': the variance is frozen after {self._warmup} steps, in which {left_out:,} of "
                f"{weights:,} weights had no gradient. These weights are not trained any more. If they should "
                "be, give a longer warm-up, by warmup_steps=."
            )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
