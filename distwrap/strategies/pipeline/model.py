"""A model in stages: its methods run through all of them, on every rank of the pipeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distwrap._internals.torch import foreach, norm_classes
from distwrap._internals.torch_tree import map_tensors, tensors_in, tree_leaves
from distwrap.errors import CollectiveTimeoutError, ModelError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.collectives import gather_object
from distwrap.group.world import World, say_once
from distwrap.model.buffers import Buffers
from distwrap.model.forward_routing import Routing
from distwrap.model.in_sync import Held, fingerprints, first_difference
from distwrap.model.model_first import ModelFirst
from distwrap.model.watch import is_power_of_two
from distwrap.precision import LossScaling
from distwrap.seeding import preserved
from distwrap.strategies.alignment import Alignment
from distwrap.strategies.base import Wrapping
from distwrap.strategies.pipeline.absent import is_here, make_present, refuse_copy
from distwrap.strategies.pipeline.blocks import Chain
from distwrap.strategies.pipeline.gradients import Gradients, Results, apart
from distwrap.strategies.pipeline.holders import Holders
from distwrap.strategies.pipeline.microbatches import batch_size, parts_of
from distwrap.strategies.pipeline.relay import Method, Relay, Survey
from distwrap.strategies.pipeline.schedule import Line, TrainingPass, WholePass, shared

_PASSES = 4  # of which the buffers are kept
_SURVEYS = 64  # which are kept
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


Kind = tuple[str, bool, str]


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
    is_given: bool
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
        self._alignment = Alignment(type(net).__name__, line.ranks)
        self.stage_buffers = self._stage_buffers()
        self._surveys: dict[Any, Survey] = {}
        self._passes: dict[Any, TrainingPass] = {}
        self._kinds: dict[tuple[str, bool], bool] = {}  # whether a method calls the model as a whole
        self._reductions: dict[Kind, str] = {}
        self._batches: Counter[Kind] = Counter()
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

    def give_back(self, state: dict[str, Any]) -> None:
        """Make the user's module again what it was, with a full state."""
        self.relay.release()
        vars(self.module).pop("forward")
        make_present(self.module)
        self.model.load_state_dict(state)

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
        self._alignment.forward()
        try:
            if self._is_first:
                self._check_alike(given)
                self._is_first = False
            if torch.is_grad_enabled():
                return self._in_precision.outputs(self._train(name, method, given))
            with torch.inference_mode(False), torch.no_grad():  # where views of parameters can be taken
                return self._evaluate(name, method, given)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise CollectiveTimeoutError(
                    f"rank {self.world.placement.rank} waited in vain for another stage, in {name}(). Under "
                    f"strategy='pipeline' all ranks of a pipeline run a model's forward together, also in evaluation."
                ) from error
            raise

    def _evaluate(self, name: str, method: Method, given: Any) -> Any:
        return self._whole(name, method, given).forward(method, given)

    def _whole(self, name: str, method: Method, given: Any) -> WholePass:
        return WholePass(self.relay, self.line, self._survey(name, method, given), self._in_precision)

    def _kind(self, name: str, given: Any) -> Kind:
        """Return a method's name, whether the model trains, and the arguments that are no tensors."""
        others = [leaf for leaf in tree_leaves(given) if not isinstance(leaf, (torch.Tensor, float))]
        return name, self.model.training, repr(others)

    def _survey(self, name: str, method: Method, given: Any) -> Survey:
        sizes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(given)]
        device = self.line.device.type
        key = (
            (*self._kind(name, given), torch.is_grad_enabled(), repr(sizes)),
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), self.holders.thawed()),
        )
        if key not in self._surveys:
            with preserved(), self._in_precision.context():
                survey = self.relay.survey(method, *given)
                self.holders.settle(survey)
            survey.key = key
            self._surveys = {**dict(list(self._surveys.items())[1 - _SURVEYS :]), key: survey}
        return self._surveys[key]

    def _stage_buffers(self) -> Buffers | None:
        """Return the buffers of this rank's stages, of which the first pipeline's are those that count."""
        channel, place = self.world.channel, dist.get_rank(self.line.group)
        name = f"{self.world.count('model in stages')} of stage {place}"
        if channel is None or self.world.layout.size == 1:
            return None
        rank = self.world.placement.rank
        return Buffers(self.model, rank, channel, name, source=place, holds=is_here)

    def _train(self, name: str, method: Method, given: Any) -> Any:
        if self.stage_buffers is not None:
            self.stage_buffers.forwards += 1
        count = self._count(name, given)
        parts = parts_of(given, count)
        survey = self._survey(name, method, parts[0])
        if not isinstance(survey.result, torch.Tensor) or survey.result.numel() != 1:
            return self._train_whole(name, method, given)
        if not survey.result.requires_grad:
            return self._evaluate(name, method, given)
        if count > 1 and survey.changed and not self.settings.is_given:
            say_once(
                f"buffers {name}",
                f"{name}() changes the buffer {min(survey.changed)!r}, so a batch runs as a whole through the stages, "
                f"and changes it once. PipelineStrategy(microbatches=...) cuts it: each microbatch then changes it.",
            )
            parts = [given]
        reduction = self._reduction(name, method, given, parts)
        if reduction == "whole":
            parts = [given]
        if len(parts) < count:
            count = 1
            survey = self._survey(name, method, given)
        key = survey.key, count
        if key not in self._passes:
            self._passes[key] = TrainingPass(
                self.settings.schedule, self.relay, self.line, survey, self._in_precision, count
            )
        training_pass = self._passes.pop(key)
        self._passes = {**dict(list(self._passes.items())[1 - _PASSES :]), key: training_pass}  # those used last
        scale = self._scale()
        with apart(self.holders.trained()) as found:
            loss = training_pass.run(method, parts, 1.0 if reduction == "sum" else 1 / count, scale)
        self.holders.add_up(found, name)
        like = loss if loss is not None else self._in_precision.precision.outputs(survey.result.detach())
        total = shared(like.reshape(()), self.line)
        return _linked(total, [total], lambda grads: self._lay(found, grads[0] / scale))

    def _train_whole(self, name: str, method: Method, given: Any) -> Any:
        """Run a method that returns other things than a loss, whose gradients come later."""
        say_once(
            f"whole {name}",
            f"{name}() runs a batch as a whole through the stages, one after the other: it returns no loss alone. Put "
            f"the loss into a method, as model.loss(x, y), and strategy='pipeline' runs microbatches side by side.",
        )
        whole = self._whole(name, method, given)
        survey = self._survey(name, method, given)
        with torch.enable_grad():
            result = whole.forward(method, given)
        needed = [tensor.requires_grad for tensor in tensors_in(survey.result)]
        linked = [tensor for tensor, needs in zip(tensors_in(result), needed, strict=True) if needs]

        def hand_on(grads: list[torch.Tensor]) -> None:
            with apart(self.holders.trained()) as found, torch.enable_grad():
                whole.backward(grads)
            self.holders.add_up(found, name)
            self._lay(found, None)

        return _linked(result, linked, hand_on) if linked else result

    def _count(self, name: str, given: Any) -> int:
        """Return into how many microbatches a batch is cut."""
        if self._reductions.get(self._kind(name, given)) == "whole" or (
            not self.settings.is_given and self._has_batch_norm()
        ):
            return 1
        batch = batch_size(given)
        return next(n for n in range(max(1, min(self.settings.microbatches, batch)), 0, -1) if batch % n == 0)

    def _has_batch_norm(self) -> bool:
        """Return whether the numbers of a sample depend on those of the others in its batch."""
        return any(module.training and isinstance(module, norm_classes()) for module in self.model.modules())

    def _reduction(self, name: str, method: Method, given: Any, parts: list[Any]) -> str:
        """Return whether a loss is the mean or the sum over its batch, from one batch in whole and in parts.

        Batch 1, 2, 4, 8, … is looked at; where it is neither, batches are run as a whole from then on.
        """
        kind = self._kind(name, given)
        found = self._reductions.get(kind, self.settings.reduction)
        if self.settings.reduction != "auto" or found == "whole" or len(parts) == 1:
            return "mean" if found == "auto" else found
        self._batches[kind] += 1
        if not is_power_of_two(self._batches[kind]):
            return found

        def measured() -> tuple[torch.Tensor, torch.Tensor]:
            whole = self._evaluate(name, method, given)
            return whole, torch.stack([self._evaluate(name, method, part).reshape(()).double() for part in parts])

        training = [module for module in self.model.modules() if module.training]
        with torch.no_grad(), preserved(), self.holders.kept_buffers():
            noisy = measured() if training and found == "auto" else None  # with dropout
            for module in training:
                module.training = False
            try:
                whole, each = measured()
            finally:
                for module in training:
                    module.training = True
        tolerance = _TOLERANCE.get(whole.dtype, 0.02) if self._in_precision.is_plain else 0.02
        size = each.abs().mean().item()
        if not 0 < size < math.inf:
            self._batches[kind] -= 1  # it shows nothing
            return "mean" if found == "auto" else found
        errors = {"mean": abs(each.mean() - whole).item() / size}
        errors["sum"] = abs(each.sum() - whole).item() / (size * len(parts))
        best = min(errors, key=lambda each: errors[each])
        differs = False  # in training from what it is in evaluation
        if noisy is not None:
            of_sum, of_mean = abs(noisy[1].sum() - noisy[0]), abs(noisy[1].mean() - noisy[0])
            differs = (of_sum < of_mean).item() != (best == "sum")
        if errors[best] > tolerance or differs or found not in ("auto", best):
            best = "whole"
            say_once(
                f"neither {name}",
                f"{name}() of a batch is {whole.item():.6g}, which is neither the mean of its {len(parts)} "
                f"microbatches, {each.mean().item():.6g}, nor their sum, {each.sum().item():.6g}. From now on its "
                f"batches run as a whole, one stage after the other. A loss that is a sum, with "
                f"distwrap.scale_loss(loss, count), runs microbatches side by side.",
            )
        self._reductions[kind] = best
        return best

    def _scale(self) -> float:
        """Return by what losses are multiplied for their backwards, so that gradients in float16 do not vanish."""
        scaling = self.world.part(LossScaling)
        if scaling.scaler is None:
            return 1.0
        scaling.update()
        return scaling.scaler.get_scale()

    def _lay(self, found: Gradients, factor: torch.Tensor | None) -> None:
        """Add gradients to those that the parameters have, and average them with the other pipelines'."""
        if found and factor is not None:
            foreach("mul_", list(found.values()), float(factor))
        for parameter, grad in found.items():
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        if self.syncs and self.world.layout.size > 1:
            self.holders.average(self.world.layout)
        if self.world.part(LossScaling).scaler is not None:
            self.holders.spread_overflow()

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

    def train(self, mode: bool = True) -> Any:
        """Set the training flag; when training pauses, take over the first pipeline's buffers."""
        buffers, pauses = self._distwrap.stage_buffers, self.training and not mode
        super().train(mode)
        if pauses and buffers is not None:
            buffers.pause()
        return self

    def __reduce__(self) -> Any:
        refuse_copy()

    def __copy__(self) -> Any:
        refuse_copy()


def _linked(result: Any, tensors: list[torch.Tensor], hand_on: Callable[[list[torch.Tensor]], None]) -> Any:
    """Return a result some of whose tensors hand on their gradients."""
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        linked = Results.apply(anchor, hand_on, *tensors)  # type: ignore[no-untyped-call]
    instead = {id(tensor): new for tensor, new in zip(tensors, linked, strict=True)}
    return map_tensors(lambda tensor: instead.get(id(tensor), tensor), result)
