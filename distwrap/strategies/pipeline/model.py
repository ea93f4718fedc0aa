"""A model in stages: its methods run through all of them, on every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distwrap._internals.torch import foreach
from distwrap._internals.torch_tree import map_tensors, tensors_in, tree_leaves
from distwrap.errors import CollectiveTimeoutError, ModelError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.collectives import gather_object
from distwrap.group.world import World
from distwrap.model.forward_routing import Routing
from distwrap.model.in_sync import Held, fingerprints, first_difference
from distwrap.model.model_first import ModelFirst
from distwrap.precision import LossScaling
from distwrap.seeding import preserved
from distwrap.strategies.base import Wrapping
from distwrap.strategies.pipeline.blocks import Chain
from distwrap.strategies.pipeline.gradients import Gradients, LossOfSchedule, apart
from distwrap.strategies.pipeline.holders import Holders
from distwrap.strategies.pipeline.relay import Method, Relay, Survey
from distwrap.strategies.pipeline.schedule import Line, TrainingPass, evaluate, shared

_PASSES = 4  # of which the buffers are kept
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


class _Begins(BaseException):
    """A method has come to its first forward."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole  # it calls the model itself, without gradients


@dataclass(frozen=True)
class PassSettings:
    """Choices for the passes of a model.

    Attributes:
        schedule: the name of torch's schedule.
        microbatches: how many at most.
        is_given: whether the user has chosen that number.
        reduction: whether a loss is the mean or the sum over a batch; ``"auto"`` to find out.
    """

    schedule: str
    microbatches: int
    reduction: Literal["auto", "mean", "sum"]


class PipelineRouting(Routing):
    """Runs of the model's methods through the stages.

    Args:
        net: the user's model.
        chain: its blocks.
        line: this rank's place.
        world: of the run.
        wrapping: precision, device, methods.
        settings: how to run.

    Attributes:
        holders: which ranks have what.
        syncs: whether the next backward averages gradients with the other pipelines.
    """

    def __init__(
        self, net: nn.Module, chain: Chain, line: Line, world: World, wrapping: Wrapping, settings: PassSettings
    ) -> None:
        super().__init__(net, wrapping.in_precision, wrapping.forward_methods)
        self.line, self.world, self.settings = line, world, settings
        self.holders = Holders(net, chain, line)
        self.relay = Relay(net, chain)
        self.syncs = True
        self._surveys: dict[Any, Survey] = {}
        self._passes: dict[Any, TrainingPass] = {}
        self._kinds: dict[tuple[str, bool], bool] = {}  # whether a method calls the model as a whole
        self._reductions: dict[str, str] = {}
        self._is_first = True
        self._forward = net.forward
        net.forward = self._on_forward
        self.run = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        return self.module(*args, **kwargs)

    def _on_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run what the model's own forward is."""
        if self.relay.is_running:
            return self._forward(*args, **kwargs)
        return self._through_stages("forward", self._forward, args, kwargs)

    def _routed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.relay.is_running:
                return method(*args, **kwargs)
            args, kwargs = self._moved((args, kwargs), "left")
            kind = name, torch.is_grad_enabled()
            if kind not in self._kinds:
                try:
                    with self._watched():
                        return method(*args, **kwargs)
                except _Begins as begins:
                    self._kinds[kind] = begins.whole
            if self._kinds[kind]:
                return method(*args, **kwargs)
            return self._through_stages(name, method, args, kwargs)

        return run

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Interrupt at the first call of a module of the model."""

        def on_call(module: nn.Module, args: Any) -> None:
            if id(module) in self._parts:
                raise _Begins(module is self.model and not torch.is_grad_enabled())

        handle = register_module_forward_pre_hook(on_call)
        try:
            yield
        finally:
            handle.remove()

    def _through_stages(self, name: str, method: Method, args: Any, kwargs: Any) -> Any:
        check_collectives_allowed(f"{name}() of a model under strategy='pipeline'")
        given = self._in_precision.inputs((args, kwargs))
        try:
            if self._is_first:
                self._check_alike(given)
                self._is_first = False
            if torch.is_grad_enabled():
                return self._train(name, method, given)
            return self._in_precision.outputs(self._evaluate(name, method, given))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise CollectiveTimeoutError(
                    f"rank {self.world.placement.rank} waited in vain for another stage, in {name}(). Under "
                    f"strategy='pipeline' all ranks of a pipeline run a model's forward together, also in evaluation."
                ) from error
            raise

    def _evaluate(self, name: str, method: Method, given: Any) -> Any:
        survey = self._survey(name, method, given)
        return evaluate(self.relay, self.line, survey, self._in_precision, method, given)

    def _survey(self, name: str, method: Method, given: Any) -> Survey:
        sizes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(given)]
        others = [leaf for leaf in tree_leaves(given) if not isinstance(leaf, torch.Tensor)]
        key = name, torch.is_grad_enabled(), self.model.training, repr(sizes), repr(others)
        if key not in self._surveys:
            with preserved(), self._in_precision.context():
                survey = self.relay.survey(method, *given)
            self.holders.settle(survey)
            self._surveys[key] = survey
            survey.key = key
        return self._surveys[key]

    def _train(self, name: str, method: Method, given: Any) -> torch.Tensor:
        batch = _batch_size(given)
        count = next(n for n in range(min(self.settings.microbatches, batch), 0, -1) if batch % n == 0)
        parts = _parts(given, batch, count)
        survey = self._survey(name, method, parts[0])
        self._check_loss(name, survey)
        is_mean = self._reduction(name, method, given, parts) == "mean"
        key = survey.key, count
        if key not in self._passes:
            self._passes[key] = TrainingPass(
                self.settings.schedule, self.relay, self.line, survey, self._in_precision, count
            )
        training_pass = self._passes.pop(key)
        self._passes = {**dict(list(self._passes.items())[1 - _PASSES :]), key: training_pass}  # those used last
        trained = self.holders.trained()
        scale = self._scale()
        with apart(trained) as found:
            loss = training_pass.run(method, parts, 1 / count if is_mean else 1.0, scale)
        self.holders.add_up(found)
        like = loss if loss is not None else self._in_precision.precision.outputs(survey.result.detach())
        total = shared(like.reshape(()), self.line)
        anchor = trained[0] if trained else torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            result: torch.Tensor = LossOfSchedule.apply(  # type: ignore[no-untyped-call]
                anchor, total, lambda factor: self._lay(found, factor / scale)
            )
        outputs: torch.Tensor = self._in_precision.outputs(result)
        return outputs

    def _check_loss(self, name: str, survey: Survey) -> None:
        result = survey.result
        if isinstance(result, torch.Tensor) and result.numel() == 1 and result.requires_grad:
            return
        seen = f"a tensor of {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise ModelError(
            f"{name}() returns {seen}, and under strategy='pipeline' what runs with gradients on is a method that "
            f"returns a loss, a single number: the schedule runs forward and backward of each microbatch at once. Put "
            f"the loss into a method of the model, as def loss(self, x, y): return F.cross_entropy(self(x), y), and "
            f"call model.loss(x, y). For outputs alone call it under torch.no_grad()."
        )

    def _reduction(self, name: str, method: Method, given: Any, parts: list[Any]) -> str:
        """Return whether a loss is the mean or the sum over its batch, from one batch in whole and in parts."""
        found = self._reductions.get(name, self.settings.reduction)
        if found != "auto" or len(parts) == 1:
            return "mean" if found == "auto" else found
        training = [module for module in self.model.modules() if module.training]
        with torch.no_grad(), preserved():
            for module in training:
                module.training = False
            try:
                whole = self._evaluate(name, method, given)
                each = torch.stack([self._evaluate(name, method, part).reshape(()).double() for part in parts])
            finally:
                for module in training:
                    module.training = True
        tolerance = _TOLERANCE.get(whole.dtype, 0.02) if self._in_precision.is_plain else 0.02
        size = each.abs().mean().item()
        errors = {"mean": abs(each.mean() - whole).item() / size if size else 0.0}
        errors["sum"] = abs(each.sum() - whole).item() / (size * len(parts)) if size else 0.0
        best = min(errors, key=lambda kind: errors[kind])
        if size and errors[best] > tolerance:
            raise ModelError(
                f"{name}() of a batch is {whole.item():.6g}, which is neither the mean of its {len(parts)} "
                f"microbatches, {each.mean().item():.6g}, nor their sum, {each.sum().item():.6g}: it would be trained "
                f"otherwise than in one process. Return the sum and use distwrap.scale_loss(), or take "
                f"PipelineStrategy(microbatches=1); where only its randomness differs, PipelineStrategy(reduction=...)."
            )
        if size:
            self._reductions[name] = best
        return best

    def _scale(self) -> float:
        """Return by what losses are multiplied for their backwards, so that gradients in float16 do not vanish."""
        scaling = self.world.part(LossScaling)
        if scaling.scaler is None:
            return 1.0
        scaling.update()
        return scaling.scaler.get_scale()

    def _lay(self, found: Gradients, factor: torch.Tensor) -> None:
        """Add gradients to those that the parameters have, and average them with the other pipelines'."""
        if found:
            foreach("mul_", list(found.values()), float(factor))
        for parameter, grad in found.items():
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        held = [parameter.grad for parameter in self.holders.trained() if parameter.grad is not None]
        layout = self.world.layout
        if self.syncs and layout.size > 1:
            for work in [dist.all_reduce(grad, group=layout.group, async_op=True) for grad in held]:
                work.wait()
            if held:
                foreach("div_", held, float(layout.size))
        if self.world.part(LossScaling).scaler is not None:  # all stages must skip a step alike
            overflowed = torch.tensor(float(not all(grad.isfinite().all() for grad in held)), device=self.line.device)
            dist.all_reduce(overflowed, op=dist.ReduceOp.MAX)
            for grad in held if overflowed else ():
                grad.fill_(torch.inf)

    def _check_alike(self, given: Any) -> None:
        """Refuse a batch of which the ranks of a pipeline have others."""
        held = [Held(f"tensor {number}", "", tensor) for number, tensor in enumerate(tensors_in(given))]
        everyone = gather_object(fingerprints(held))
        difference = first_difference([everyone[rank] for rank in self.line.ranks], ranks=self.line.ranks)
        if difference is not None:
            raise ModelError(
                f"the ranks of a pipeline run on one batch, and these have been given others: {difference}. Take the "
                f"batches from distwrap.shard_loader(loader), which gives all ranks of a pipeline the same share."
            )


class PipelineModel(ModelFirst):
    """A model of which this rank has the blocks of its stages."""

    _distwrap: PipelineRouting


def _batch_size(given: Any) -> int:
    sizes = [len(tensor) for tensor in tensors_in(given) if tensor.dim()]
    if not sizes:
        raise ModelError("a method that trains under strategy='pipeline' takes a batch of tensors, and got none.")
    return sizes[0]


def _parts(given: Any, batch: int, count: int) -> list[Any]:
    """Return the arguments of each microbatch: tensors as long as the batch are cut, others go to all of them."""
    size = batch // count

    def part(number: int) -> Any:
        return map_tensors(
            lambda tensor: (
                tensor[number * size : (number + 1) * size] if tensor.dim() and len(tensor) == batch else tensor
            ),
            given,
        )

    return [part(number) for number in range(count)]
