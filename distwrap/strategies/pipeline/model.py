"""The wrapper of a model in stages, whose methods run through all stages on every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distwrap._internals.torch import foreach, norm_classes
from distwrap._internals.torch_autograd import call_after_accumulation, hooked
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.errors import ModelError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.world import World, say_once
from distwrap.model.buffers import Buffers
from distwrap.model.forward_routing import Routing, put_back_forward
from distwrap.model.proxy import UncopiedModel
from distwrap.model.wrapped_models import WrappedModels, held_by_all, routing_of
from distwrap.precision import LossScaling
from distwrap.seeding import preserved
from distwrap.strategies.base import Wrapping
from distwrap.strategies.named_inputs import NamedInputs
from distwrap.strategies.pipeline.absent import Absent, is_here, make_present, refuse_copy
from distwrap.strategies.pipeline.attributes import Snapshot
from distwrap.strategies.pipeline.blocks import Chain
from distwrap.strategies.pipeline.calls import Call, Latest, call_of, refuse_parts, refuse_trained
from distwrap.strategies.pipeline.gradients import Gradients, Results, apart, is_of_pass
from distwrap.strategies.pipeline.holders import Holders
from distwrap.strategies.pipeline.loss_kinds import LossKinds
from distwrap.strategies.pipeline.microbatches import batch_size, parts_of
from distwrap.strategies.pipeline.relay import Method, Relay, Survey
from distwrap.strategies.pipeline.schedule import Line, StageError, TrainingPass, WholePass
from distwrap.strategies.pipeline.streams import Streams
from distwrap.strategies.rendezvous import Rendezvous, SameBatch
from distwrap.wording import first_line

_PASSES = 4  # the last passes keep their buffers


class _Begins(BaseException):
    """Signal that a method has reached its first forward."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole  # whether it calls the model itself without gradients


@dataclass(frozen=True)
class PassSettings:
    """Settings for the passes of a model.

    Attributes:
        schedule: the name of torch's schedule.
        microbatches: the most microbatches.
        is_given: whether the user has given that number.
        reduction: whether a loss is the mean or the sum over a batch; ``"auto"`` finds out.
    """

    schedule: str
    microbatches: int
    is_given: bool
    reduction: Literal["auto", "mean", "sum"]


class PipelineRouting(Routing):
    """Runs of a model's methods through the stages.

    Args:
        net: the user's model.
        chain: the blocks of the model.
        line: this rank's place in the pipeline.
        world: the world of the run.
        wrapping: precision, device and methods.
        settings: the settings of passes.

    Attributes:
        holders: the ranks that have each tensor.
        number: of the model among those in stages, the same on all ranks.
        alignment: the forwards of the model.
        syncs: whether the next backward averages gradients with the other pipelines.
    """

    def __init__(
        self, net: nn.Module, chain: Chain, line: Line, world: World, wrapping: Wrapping, settings: PassSettings
    ) -> None:
        super().__init__(net, wrapping.in_precision, wrapping.forward_methods)
        self.line, self.world, self.settings = line, world, settings
        self.holders = Holders(net, chain, line)
        self._streams = Streams(line.device)
        self.relay = Relay(net, chain, self._streams)
        self.number = world.count("model in stages")
        for twin in held_by_all(self._twins()):
            self.holders.settle_as(twin)
        self._kinds_of_losses = LossKinds(self.relay, line, wrapping.in_precision, self._streams, settings.reduction)
        self._alike = SameBatch(line.group, line.device, "the ranks of a pipeline", draws_alike=True)
        self._broken = ""  # the method in which stages got out of step
        world.part(NamedInputs).models.add(self)
        self.syncs = True
        self.alignment = Rendezvous(type(net).__name__, line.ranks)
        self.buffers = self._own_buffers()
        self._surveys: Latest[Any, Survey] = Latest()
        self._passes: Latest[Any, TrainingPass] = Latest(_PASSES)
        self._kinds: dict[tuple[str, bool], bool] = {}  # whether a method calls the model as a whole
        self._forward, self._own_forward = net.forward, vars(net).get("forward")
        net.forward = self._on_forward
        self.forward = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        return self.module(*args, **kwargs)

    def _on_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if self.relay.is_running:
            return self._forward(*args, **kwargs)
        return self._through_stages("forward", self._forward, args, kwargs)

    def give_back(self, state: dict[str, Any]) -> None:
        """Restore the user's module with a full state."""
        self.relay.release()
        put_back_forward(self.module, self._own_forward)
        make_present(self.module)
        self.model.load_state_dict(state)
        for name, buffer in self.model.named_buffers():  # also those that are in no state dict
            dist.broadcast(buffer, self.line.ranks[min(self.holders.ranks[name])], self.line.group)

    def _routed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.relay.is_running:
                return method(*args, **kwargs)
            args, kwargs = self._moved((args, kwargs), "left")
            kind = name, torch.is_grad_enabled()
            if kind not in self._kinds:
                before = Snapshot(self.model, (args, kwargs))
                try:
                    with self._watched():
                        return method(*args, **kwargs)
                except _Begins as begins:
                    self._kinds[kind] = begins.whole
                    with torch.no_grad():
                        before.restore()
            if self._kinds[kind]:
                return method(*args, **kwargs)
            return self._through_stages(name, method, args, kwargs)

        return run

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise an exception at the first call of one of the model's modules."""

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
        if self._broken:
            raise ModelError(
                f"rank {self.world.placement.rank}: a pass through the stages, in {self._broken}(), ended "
                "early, for the reason that its error gives. Since then the stages are out of step: start the "
                "run again, from a checkpoint."
            )
        given = self._in_precision.inputs((args, kwargs))
        if torch.is_grad_enabled():
            refuse_trained(name, given)
            refuse_parts(name)
        self.alignment.forward()
        self._alike.check(name, given)
        call = call_of(name, given, self.model, self.line.device.type)
        if torch.is_grad_enabled():
            return self._in_precision.outputs(self._train(call, method, given))
        with torch.inference_mode(False), torch.no_grad():  # views of parameters are allowed here
            return self._evaluate(call, method, given)

    def _evaluate(self, call: Call, method: Method, given: Any) -> Any:
        whole = self._whole(self._survey(call, method, given))
        with self._in_step(call.name):
            return whole.forward(method, given)

    def _whole(self, survey: Survey) -> WholePass:
        return WholePass(self.relay, self.line, survey, self._in_precision, self._streams)

    @contextmanager
    def _in_step(self, name: str) -> Iterator[None]:
        """Note a pass that ends early, for whose messages the other stages wait."""
        error = None
        try:
            yield
        except StageError as ended:  # all stages have ended the pass
            error = ended.error
        except BaseException:
            self._broken = name
            raise
        if error is not None:
            raise error from error.__cause__

    def _survey(self, call: Call, method: Method, given: Any) -> Survey:
        key = call, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(given))
        if key not in self._surveys:
            with preserved(), self._streams.kept(), self._in_precision.context():
                survey = self.relay.survey(method, *given)
                for holders in (self.holders, *self._twins().values()):
                    holders.settle(survey)
                self.holders.check(survey)
            survey.key = key
            self._surveys[key] = survey
        return self._surveys[key]

    def _twins(self) -> dict[int, Holders]:
        """Return the holders of similar models, such as averages, which must have the same stages, by their numbers."""
        others = [routing_of(model) for model in self.world.part(WrappedModels)]
        return {
            other.number: other.holders
            for other in others
            if isinstance(other, PipelineRouting) and other is not self and other.holders.is_like(self.holders)
        }

    def _own_buffers(self) -> Buffers | None:
        """Return the buffers of this rank's stages; those of the first pipeline are used on all."""
        channel, place = self.world.channel, dist.get_rank(self.line.group)
        name = f"{self.number} of stage {place}"
        if channel is None or self.world.layout.size == 1:
            return None
        rank = self.world.placement.rank
        return Buffers(self.model, rank, channel, name, source=place, holds=is_here)

    def sync_buffers(self, how: str) -> None:
        """Give all pipelines the same buffers: those of the first one, or the mean."""
        self.holders.sync_buffers(self.world.layout, how)

    def _train(self, call: Call, method: Method, given: Any) -> Any:
        if self.buffers is not None:
            self.buffers.count_forward()
        count = self._count(call, given)
        parts = parts_of(given, count)
        try:
            survey = whole = self._survey(call, method, parts[0])
        except Exception as error:
            if count == 1:
                raise
            self._survey(call, method, given)  # raises an error that has nothing to do with the cut
            self._kinds_of_losses.run_whole(call, f"cannot run on a part of a batch ({first_line(error)}): it")
            return self._train(call, method, given)
        changes = count > 1 and bool(survey.changed) and not self.settings.is_given
        looks = count > 1 and not changes and self._kinds_of_losses.needs_look(call)
        if changes or looks or 1 < count == batch_size(given):
            whole = self._survey(call, method, given)  # with one sample an output may be a scalar too
        if any(not isinstance(each.result, torch.Tensor) or each.result.numel() != 1 for each in (survey, whole)):
            return self._train_whole(call, method, given)
        if not survey.result.requires_grad:
            return self._evaluate(call, method, given)
        if changes:
            say_once(
                f"buffers {call.name}",
                f"{call.name}() changes the buffer {min(survey.changed)!r}, so a batch runs through the stages "
                "as a whole, and changes it once. To cut the batch, so that each part changes it, use "
                "PipelineStrategy(microbatches=...).",
            )
            parts, survey = [given], whole
        elif looks:
            with self._in_step(call.name):
                mixes = self.settings.is_given and (bool(survey.changed) or self._mixes_samples())  # as requested
                can_be_cut = self._kinds_of_losses.look(call, method, [given, *parts], [whole, survey], mixes)
            if not can_be_cut:
                parts, survey = [given], whole
        return self._train_parts(call, method, given, parts, survey)

    def _train_parts(self, call: Call, method: Method, given: Any, parts: list[Any], survey: Survey) -> Any:
        """Run a method that returns a loss on microbatches."""
        key = survey.key, len(parts)
        training_pass = self._passes.get(key) or TrainingPass(
            self.settings.schedule, self.relay, self.line, survey, self._in_precision, self._streams, len(parts)
        )
        self._passes[key] = training_pass  # the last used are kept
        scale = self._scale()
        with self._in_step(call.name), apart(self.holders.trained()) as found:
            outcome = training_pass.run(method, parts, self._kinds_of_losses.of(call), scale)
        if outcome.unlike and len(parts) > 1:
            self._kinds_of_losses.run_whole(call, "of a batch has microbatches with counts of their own: it")
            return self._train_parts(call, method, given, [given], self._survey(call, method, given))
        self.holders.add_up(found, call)
        like = self._in_precision.precision.outputs(survey.result)
        weight = 1.0 if len(parts) == 1 else outcome.weight
        total = torch.full(like.shape, outcome.loss / weight, dtype=like.dtype, device=self.line.device)
        return _linked(total, [total], lambda grads: self._lay(found, grads[0].sum() / (scale * weight)))

    def _train_whole(self, call: Call, method: Method, given: Any) -> Any:
        """Run a method that does not return a loss, whose gradients come later."""
        say_once(
            f"whole {call.name}",
            f"{call.name}() runs a batch as a whole through the stages, one after the other: it returns no loss alone. "
            f"Put the loss into a method, as model.loss(x, y), and strategy='pipeline' runs microbatches side by side.",
        )
        survey = self._survey(call, method, given)
        whole = self._whole(survey)
        with self._in_step(call.name), torch.enable_grad():
            result = whole.forward(method, given)
        needed = [tensor.requires_grad for tensor in tensors_in(survey.result)]
        linked = [tensor for tensor, needs in zip(tensors_in(result), needed, strict=True) if needs]

        def hand_on(grads: list[torch.Tensor]) -> None:
            with self._in_step(call.name), apart(self.holders.trained()) as found, torch.enable_grad():
                whole.backward(grads)
            self.holders.add_up(found, call)
            self._lay(found, None)

        return _linked(result, linked, hand_on) if linked else result

    def _count(self, call: Call, given: Any) -> int:
        """Return the number of microbatches for a batch."""
        if self._kinds_of_losses.is_whole(call) or (not self.settings.is_given and self._mixes_samples()):
            return 1
        batch = batch_size(given)
        return next(n for n in range(max(1, min(self.settings.microbatches, batch)), 0, -1) if batch % n == 0)

    def _mixes_samples(self) -> bool:
        """Return whether the batch cannot be cut along dimension 0: samples interact, or it is not the batch."""
        return any(
            (module.training and isinstance(module, norm_classes())) or getattr(module, "batch_first", True) is False
            for module in self.model.modules()
        )

    def _scale(self) -> float:
        """Return the factor for losses in their backwards, so that float16 gradients do not vanish."""
        scaling = self.world.part(LossScaling)
        if scaling.scaler is None:
            return 1.0
        scaling.update()
        return scaling.scaler.get_scale()

    def _lay(self, found: Gradients, factor: torch.Tensor | None) -> None:
        """Add new gradients to those of the parameters, and average them with the other pipelines."""
        if found and factor is not None:
            foreach("mul_", list(found.values()), float(factor))
        for parameter, grad in found.items():
            grad = hooked(parameter, grad)
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        for parameter in self.model.parameters():
            if isinstance(parameter, Absent):
                parameter.has_gradient = parameter.requires_grad
        if self.syncs and self.world.layout.size > 1:
            self.holders.average(self.world.layout)
        if self.syncs and self.world.part(LossScaling).scaler is not None:
            self.holders.spread_overflow()
        for parameter in found:
            call_after_accumulation(parameter)

    def exchanges(self, nodes: Iterable[Any]) -> bool:
        """Return whether one of these graph nodes is a pass through the stages."""
        return any(is_of_pass(node) for node in nodes)

    def refuse_copy(self) -> NoReturn:
        """Refuse to copy or pickle the model, as its absent parameters do."""
        refuse_copy()


class PipelineModel(UncopiedModel):
    """Model of which this rank has the blocks of its stages."""

    def __init__(self, routing: PipelineRouting) -> None:
        super().__init__(routing, sync_buffers=routing.sync_buffers)


def _linked(result: Any, tensors: list[torch.Tensor], hand_on: Callable[[list[torch.Tensor]], None]) -> Any:
    """Return a result in which some tensors pass on their gradients."""
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        linked = Results.apply(anchor, hand_on, *tensors)  # type: ignore[no-untyped-call]
    instead = {id(tensor): new for tensor, new in zip(tensors, linked, strict=True)}
    return map_tensors(lambda tensor: instead.get(id(tensor), tensor), result)
