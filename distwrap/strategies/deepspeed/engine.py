"""A DeepSpeed engine with one model and one optimizer of the user's, and its steps.

The engine gets an optimizer of the same class and options, whose tensors it replaces by its own shares. The user's
optimizer stays: schedulers change its rates, and its step runs the engine's, which leaves no gradients for its own.

Source: https://deepspeed.readthedocs.io/en/latest/training.html
"""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import after_backward, version_of
from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import ModelError, PrecisionError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase, has_closure
from distwrap.group.world import RunPart, World
from distwrap.live_objects import instances
from distwrap.model.drift import Drift
from distwrap.model.wrapped_models import parameters_of
from distwrap.strategies.deepspeed.config import on_nvme
from distwrap.strategies.deepspeed.gradients import EngineGradient
from distwrap.strategies.deepspeed.package import environment, forget_group, import_deepspeed, quiet, without_compiler
from distwrap.strategies.optimizer_scope import refuse_scope
from distwrap.strategies.optimizer_share import refuse_whole


class ModelEngine:
    """DeepSpeed engine for a model and an optimizer; every rank makes it.

    Args:
        net: the user's model.
        optimizer: the user's optimizer, of any class that steps each number by itself.
        config: DeepSpeed's configuration.
        world: the world of the run.
        verbose: whether DeepSpeed may print.

    Attributes:
        net: the user's model.
        optimizer: the user's, if somebody still holds it.
        parameters: the parameters that the engine trains.
        inner: the optimizer that the engine steps.
        taken: whether the last step was taken; an overflow under fp16 skips it.
        scales: whether losses are scaled, as under fp16.
        is_on_nvme: whether the stepped copy of the weights is on NVMe.
    """

    def __init__(
        self, net: nn.Module, optimizer: Optimizer, config: dict[str, Any], world: World, *, verbose: bool
    ) -> None:
        refuse_whole(optimizer, in_pieces=True)
        refuse_scope(optimizer, ("element",))
        self.net, self.optimizer, self.rank = net, ref(optimizer), world.placement.rank
        self.stage: int = config["zero_optimization"]["stage"]
        self.is_on_nvme = "optimizer" in on_nvme(config)
        self.taken, self.scales = True, bool(config.get("fp16", {}).get("enabled"))
        self.parameters = [each for each in parameters_of(optimizer).values() if each.requires_grad]
        self._groups = len(optimizer.param_groups)
        self.inner = _twin(optimizer)
        world.part(Drift).apart.add(self.inner)
        deepspeed = import_deepspeed(world, verbose=verbose)
        with quiet(verbose), environment(world), without_compiler():
            try:
                self.deepspeed: Any = deepspeed.initialize(
                    model=net, optimizer=self.inner, config=config, dist_init_required=False
                )[0]
            except ValueError as error:
                if "not supported on your device" in str(error):
                    raise PrecisionError(f"rank {self.rank}: {error} Use precision='bf16' or '32'.") from None
                raise
        self._clip = float(self.deepspeed.gradient_clipping())
        self._is_in_backward = self._is_handed = self._has_ended = False
        if self.stage > 1:
            self._note_ends()
        self.note_weights()

    def watch(self, outputs: Any) -> Any:
        """Return a forward's outputs with the engine's hooks for their backward."""
        for output in tensors_in(outputs):
            if output.requires_grad:
                output.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
        self.deepspeed.__dict__["module"] = lambda: outputs
        try:
            return self.deepspeed.forward()
        finally:
            del self.deepspeed.__dict__["module"]

    def take_over_weights(self) -> None:
        """Copy changes that the loop has made to the weights, as by a clamp, into the engine's own copy.

        Raises:
            ModelError: a weight was changed while its numbers were divided over the ranks.
        """
        zero = self.deepspeed.optimizer
        if self.stage == 3:
            for name, parameter in self.net.named_parameters():
                if id(parameter) in self._versions and version_of(parameter) != self._versions[id(parameter)]:
                    raise ModelError(
                        f"rank {self.rank}: {name!r} was changed by hand, but its numbers are divided over the "
                        "ranks, so the change had no effect. Change it inside gathered_weights(model), from "
                        "distwrap.strategies.deepspeed."
                    )
            rows = zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True)
        else:
            shares = [row[self.rank] for row in zero.parallel_partitioned_bit16_groups]
            rows = zip(shares, zero.single_partition_of_fp32_groups, strict=True)
        with torch.no_grad():
            for seen, master in rows:
                if seen is None or seen.device != master.device or not master.numel():  # on NVMe
                    continue
                if seen.dtype == master.dtype:
                    master.data.copy_(seen.data)
                else:  # unchanged weights keep the bits that half precision lacks
                    changed = master.to(seen.dtype) != seen
                    master.data.copy_(torch.where(changed, seen.float(), master))

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, which is scaled under fp16."""
        self._is_in_backward = True  # the engine's backward ends after autograd's
        self._take_back()
        try:
            self.deepspeed.backward(loss)
        except BaseException:
            self._is_in_backward = False
            raise
        self._hand_over()

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of all gradients in the next step."""
        self.deepspeed.optimizer.clip_grad = max_norm

    def norm(self) -> torch.Tensor | None:
        """Return the norm of all gradients in the last step, in float32 as the weights' copy."""
        norm: torch.Tensor | float | None = self.deepspeed.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm).float()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients accumulated on this rank, to rescale by one factor on all ranks.

        Raises:
            ModelError: DeepSpeed has offloaded them.
        """
        zero = self.deepspeed.optimizer
        if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
            raise ModelError(
                "scale_loss() over a window of accumulate() rescales gradients, which DeepSpeed has offloaded. Divide "
                "the losses by the window's own count, or leave offload out."
            )
        kept = [parameter.grad.kept for parameter in self.parameters if isinstance(parameter.grad, EngineGradient)]
        tables = (zero.all_grad_tensors if self.stage < 3 else {}, zero.averaged_gradients)
        buffers = [each for table in tables for row in table.values() for each in row or ()]
        found = [each for each in [*kept, *buffers] if isinstance(each, torch.Tensor) and each.numel()]
        return list({each.data_ptr(): each for each in found}.values())

    def discard(self) -> None:
        """Drop accumulated gradients, since the loop has set them to zero."""
        self._is_handed = False
        zero = self.deepspeed.optimizer
        for parameter in self.parameters:
            parameter.grad = None
        zero.zero_grad()
        for table in (zero.all_grad_tensors, zero.averaged_gradients) if self.stage < 3 else ():
            for key in table:
                table[key] = None

    def note_weights(self) -> None:
        """Accept the current weights, whose change was also made in the engine's copy."""
        self._versions = {id(parameter): version_of(parameter) for parameter in self.parameters}

    def end(self) -> None:
        """Release the user's optimizer, and remove the engine's hooks."""
        self._is_handed = False
        self._take_back()
        with quiet(False):
            self.deepspeed.destroy()

    def make_whole(self) -> None:
        """Give every rank all weights again after the end; every rank calls it."""
        divided: list[Any] = [parameter for parameter in self.net.parameters() if hasattr(parameter, "ds_id")]
        if divided:
            divided[0].all_gather(param_list=divided)

    # Around a backward

    def _before_backward(self, gradient: torch.Tensor) -> None:
        if not self._is_in_backward:
            self._is_in_backward = True
            self._take_back()
            after_backward(lambda: after_backward(lambda: after_backward(self._hand_over)))  # after the engine's own

    def _take_back(self) -> None:
        """Restore the engine's own ``.grad``; drop all gradients if the loop has zeroed them."""
        handed = [(each, each.grad) for each in self.parameters if isinstance(each.grad, EngineGradient)]
        if self._is_handed and not handed:
            self.discard()
        for parameter, gradient in handed:
            parameter.grad = gradient.kept
        self._is_handed = self._has_ended = False

    def _note_ends(self) -> None:
        """Note when the engine has finished a backward, in which it exchanges the rest."""
        zero = self.deepspeed.optimizer
        end = zero.overlapping_partition_gradients_reduce_epilogue

        def noted() -> None:
            self._has_ended = True
            end()

        zero.overlapping_partition_gradients_reduce_epilogue = noted

    def _hand_over(self) -> None:
        self._is_in_backward = False
        if self.stage > 1 and not self._has_ended:
            raise ModelError(
                f"rank {self.rank}: DeepSpeed has not noticed the end of this backward, perhaps because two "
                "forwards came before it. Call distwrap.backward(loss) instead of loss.backward()."
            )
        self._is_handed = True
        for parameter in self.parameters:
            parameter.grad = EngineGradient(parameter, parameter.grad, self.discard)

    # Around a step

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step in the place of the user's optimizer, which then finds no gradient."""
        if has_closure(args, kwargs):
            raise ModelError(
                f"{type(optimizer).__name__}.step(closure) is not possible under strategy='deepspeed', whose "
                "engine takes no closure. Compute the loss and its gradients first, and call step()."
            )
        if len(optimizer.param_groups) != self._groups:
            raise ModelError(
                f"{type(optimizer).__name__} was given another group of parameters after its engine was made, "
                "and DeepSpeed cannot add one. Make the optimizer with all groups, or use strategy='zero1'."
            )
        _take_options(_filled(optimizer), self.inner.param_groups)
        self._take_back()
        self.take_over_weights()
        self.deepspeed.step()
        self.taken = not self.deepspeed.optimizer.overflow
        if self.stage == 3:
            self.deepspeed.optimizer.averaged_gradients.clear()  # so that no later step uses them
        self.deepspeed.optimizer.clip_grad = self._clip
        for parameter in self.parameters:
            parameter.grad = None  # the optimizer's own step must find none
        self.note_weights()

    def take_options(self) -> None:
        """Copy the options of the engine's optimizer to the user's."""
        optimizer = self.optimizer()
        if optimizer is not None:
            _take_options(self.inner.param_groups, _filled(optimizer))


class Engines(RunPart):
    """Engines of one run; their models and optimizers keep them alive."""

    def __init__(self, world: World) -> None:
        self._all: WeakSet[ModelEngine] = WeakSet()
        steps = world.part(OptimizerSteps)
        steps.listen(Phase.HIDE, self._before)
        steps.listen(Phase.SHOW, self._after)

    def __iter__(self) -> Iterator[ModelEngine]:
        return iter(self._all)

    def of(self, thing: nn.Module | Optimizer) -> ModelEngine | None:
        """Return the engine of a user's model or optimizer, if it already exists."""
        return next((engine for engine in self._all if engine.net is thing or engine.optimizer() is thing), None)

    def add(self, engine: ModelEngine) -> None:
        """Add a new engine."""
        self._all.add(engine)

    def remove(self, engine: ModelEngine) -> None:
        """Release an engine whose model goes back to the caller."""
        engine.end()
        self._all.discard(engine)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (engine := self.of(optimizer)) is not None:
            engine.before(optimizer, args, kwargs)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (engine := self.of(optimizer)) is not None:
            engine.take_options()

    def close(self) -> None:
        """Release all engines, and DeepSpeed's references to the process group."""
        for engine in list(self._all):
            engine.end()
        forget_group()


def optimizer_of(net: nn.Module) -> Optimizer | None:
    """Return the only live optimizer of a model's parameters, if there is one.

    Raises:
        ModelError: there are several, or it has parameters of other models.
    """
    own = set(map(id, net.parameters()))

    def look() -> list[Optimizer]:
        return [each for each in instances(Optimizer) if not own.isdisjoint(parameters_of(each))]

    found = look()
    if len(found) > 1:
        gc.collect()  # one may be unreferenced
        found = look()
    if found and not own.issuperset(parameters_of(found[0])):
        raise ModelError(
            f"this {type(found[0]).__name__} holds parameters that are not those of {type(net).__name__}, and "
            "an engine of DeepSpeed has one model. Wrap one module that has all of them, or give each model "
            "its own optimizer."
        )
    if len(found) > 1:
        kinds = ", ".join(sorted(type(each).__name__ for each in found))
        raise ModelError(
            f"{type(net).__name__} has {len(found)} optimizers ({kinds}), and an engine of DeepSpeed has one. "
            "Make one optimizer with a group of parameters for each rate, or use strategy='zero1'."
        )
    return found[0] if found else None


def _twin(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class, options and parameters, which shares nothing else."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler may have replaced it
    for name, value in optimizer.__dict__.items():
        if isinstance(value, OrderedDict):
            made.__dict__[name] = OrderedDict()  # of hooks
    made.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    made.state = defaultdict(dict)
    return made


def _filled(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups with parameters, which an engine keeps."""
    return [group for group in optimizer.param_groups if group["params"]]


def _take_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy the options of some parameter groups to others."""
    for given, taken in zip(source, target, strict=True):
        taken.update({name: value for name, value in given.items() if name != "params"})
