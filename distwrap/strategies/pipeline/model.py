"""The wrapper of a model in stages, whose forward runs through all stages on every rank of the pipeline."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from distwrap._internals.torch import foreach, norm_classes
from distwrap._internals.torch_autograd import call_after_accumulation, hooked
from distwrap._internals.torch_tree import map_tensors, tensors_in, tree_flatten
from distwrap.errors import ModelError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.world import World, say_once
from distwrap.model.buffers import Buffers
from distwrap.model.forward_routing import Routing, put_back_forward
from distwrap.model.wrapped_models import UncopiedModel
from distwrap.precision import LossScaling
from distwrap.strategies.base import Wrapping
from distwrap.strategies.divided_tensors import NamedInputs
from distwrap.strategies.pipeline.gradients import Gradients, apart, is_of_pass, linked
from distwrap.strategies.pipeline.passes import PassContext, SchedulePass, StageError, WholePass
from distwrap.strategies.pipeline.placement import BlockList, Placement, StageGroup
from distwrap.strategies.pipeline.remote import RemoteTensor, is_here, make_present, refuse_copy
from distwrap.strategies.pipeline.runner import Method, StageRunner, Streams
from distwrap.strategies.rendezvous import Rendezvous, SameBatch

_KEPT = 64  # shapes whose schedules are kept


class PipelineRouting(Routing):
    """Runs of a model's methods through the stages.

    Args:
        net: the user's model.
        blocks: the blocks of the model.
        placement: the ranks that hold each tensor.
        group: this rank's place in the pipeline.
        world: the world of the run.
        wrapping: precision, device and methods.
        strategy: the `PipelineStrategy`, which has what the user has said of the passes.
        loss: the name of the method that returns the loss; ``None``: the loop computes it.

    Attributes:
        alignment: the forwards of the model.
        syncs: whether the next backward averages gradients with the other pipelines.
    """

    def __init__(
        self,
        net: nn.Module,
        blocks: BlockList,
        placement: Placement,
        group: StageGroup,
        world: World,
        wrapping: Wrapping,
        strategy: Any,
        loss: str | None,
    ) -> None:
        super().__init__(net, wrapping.in_precision, wrapping.forward_methods)
        self.group, self.placement, self.world = group, placement, world
        self._strategy, self._loss = strategy, loss
        self._whole_methods = self._forward_methods or frozenset()
        self._forward_methods = None  # so that each method is looked at
        streams = Streams(group.device)
        self._runner = StageRunner(self.model, blocks, streams)
        self._context = PassContext(self._runner, group, placement, streams, wrapping.in_precision)
        self._alike = SameBatch(group.group, group.device, "the ranks of a pipeline", draws_alike=True)
        self._broken = ""  # the method in which stages got out of step
        world.part(NamedInputs).models.add(self)
        self.syncs = True
        self.alignment = Rendezvous(type(net).__name__, group.ranks)
        self.buffers = self._own_buffers()
        self._passes: dict[Any, SchedulePass] = {}
        self._own_forward = vars(self.model).get("forward")
        self._forward = self.model.forward
        self.model.forward = _uncompiled(self._on_forward)
        self.forward = _uncompiled(self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        return self.module(*args, **kwargs)

    def _on_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if self._runner.is_running:
            return self._forward(*args, **kwargs)
        return self._through_stages("forward", self._forward, args, kwargs)

    def _routed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._runner.is_running:
                return method(*args, **kwargs)
            args, kwargs = self._moved((args, kwargs), "left")
            if name == self._loss or name in self._whole_methods:
                return self._through_stages(name, method, args, kwargs)
            return method(*args, **kwargs)

        return _uncompiled(run)

    def restore_original(self, state: dict[str, Any]) -> None:
        """Restore the user's module with a full state."""
        self._runner.release()
        put_back_forward(self.model, self._own_forward)
        make_present(self.model)
        self.model.load_state_dict(state)
        for name, buffer in self.model.named_buffers():  # also those that are in no state dict
            dist.broadcast(buffer, self.group.ranks[min(self.placement.ranks[name])], self.group.group)

    def _through_stages(self, name: str, method: Method, args: Any, kwargs: Any) -> Any:
        check_collectives_allowed(f"{name}() of a model under strategy='pipeline'")
        if self._broken:
            raise ModelError(
                f"rank {self.world.placement.rank}: a pass through the stages, in {self._broken}(), ended "
                "early, for the reason that its error gives. Since then the stages are out of step: start the "
                "run again, from a checkpoint."
            )
        given = self._in_precision.inputs((args, kwargs))
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.model.parameters())
        if trains and any(tensor.requires_grad for tensor in tensors_in(given)):
            raise ModelError(
                f"{name}() got a tensor that requires a gradient, and under strategy='pipeline' no gradient goes "
                "back to the inputs of the model. Compute the tensor in the model's own method, or detach() it; or "
                "use strategy='fsdp'."
            )
        self.alignment.forward()
        self._alike.check(name, given)
        if torch.is_grad_enabled() and self.buffers is not None:
            self.buffers.count_forward()
        if trains and name == self._loss:
            result = self._scheduled(name, method, given)
        else:
            if trains:
                say_once(
                    f"whole {name}",
                    f"{name}() runs a batch as a whole through the stages, one after the other. If a method of the "
                    "model returns the loss, as model.loss(x, y), name it, and stages work side by side: "
                    "PipelineStrategy(loss='loss').",
                )
            result = self._whole(name, method, given, trains)
        return self._in_precision.outputs(result) if torch.is_grad_enabled() else result

    def _whole(self, name: str, method: Method, given: Any, trains: bool) -> Any:
        """Run a method on a whole batch; gradients of its result, if it trains, come later."""
        whole = WholePass(self._context)
        with torch.inference_mode(False), torch.set_grad_enabled(trains), self._in_step(name):
            result, trained = whole.forward(method, given)

        def hand_on(grads: list[torch.Tensor]) -> None:
            with self._in_step(name), apart(self.placement.trained()) as found, torch.enable_grad():
                whole.backward(grads)
            self._lay(found, None)

        return linked(result, trained, hand_on) if trained else result

    def _scheduled(self, name: str, method: Method, given: Any) -> Any:
        """Run a method that returns the loss on microbatches; its gradients are kept until the backward."""
        strategy, batch = self._strategy, _batch_size(given)
        most = strategy.microbatches or 2 * len(self.group.ranks)
        count = next(n for n in range(max(1, min(most, batch)), 0, -1) if batch % n == 0)
        if count > 1 and strategy.microbatches is None:
            self._refuse_mixing()
        parts = [_part(given, batch, number, batch // count) for number in range(count)] if count > 1 else [given]
        factors = self._factors(method, parts)
        key = self._key(parts[0], count)
        if key not in self._passes:
            with self._in_precision.context():
                outputs = self._runner.shapes(method, parts[0])
            if len(self._passes) >= _KEPT:
                del self._passes[next(iter(self._passes))]
            self._passes[key] = SchedulePass(strategy.schedule, self._context, outputs, count)
        whole = map_tensors(torch.clone, given) if strategy.checks else None
        scale = self._scale()
        with self._in_step(name), apart(self.placement.trained()) as found:
            total = self._passes[key].run(method, parts, factors, scale, whole)
        return linked(total, [total], lambda grads: self._lay(found, grads[0] / scale))

    def _factors(self, method: Method, parts: list[Any]) -> list[float]:
        """Return the weight of each microbatch's loss in that of the batch."""
        if self._strategy.reduction == "sum":
            return [1.0] * len(parts)
        weight, weights = self._strategy.weight, [1.0] * len(parts)
        if weight is not None:
            found = [weight(_target(method, args, kwargs)) for args, kwargs in parts]
            try:
                weights = [float(each) for each in found]
                counts = all(each >= 0 and math.isfinite(each) for each in weights)
            except (TypeError, ValueError, RuntimeError):  # None, a tensor of several numbers
                counts = False
            if not counts:
                raise ModelError(
                    f"weight= has returned {found[0]!r}: it returns one number, how much counts in a target, as "
                    "(target != pad).sum()."
                )
        total = sum(weights)
        return [each / total if total else 1 / len(parts) for each in weights]

    def _refuse_mixing(self) -> None:
        """Refuse to cut a batch, unless the user has asked for it, where a module says that its samples depend."""
        for name, module in self.model.named_modules():
            is_norm = module.training and isinstance(module, norm_classes())
            if is_norm or getattr(module, "batch_first", True) is False:
                why = "takes statistics over a batch" if is_norm else "may not have the batch first (batch_first=False)"
                raise ModelError(
                    f"{name!r} {why}, so that cutting a batch changes what it computes. Say which is meant: "
                    "PipelineStrategy(microbatches=1) for whole batches, or a larger number for parts of a batch, each "
                    "with statistics of its own."
                )

    def _key(self, given: Any, count: int) -> tuple[Any, ...]:
        """Return what decides about sizes, types and gradients, as far as it is known without running the model."""
        device, (leaves, structure) = self.group.device.type, tree_flatten(given)
        tensors = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(given))
        plain = tuple(leaf if isinstance(leaf, (bool, int, str)) else type(leaf) for leaf in leaves)
        modes = tuple(module.training for module in self.model.modules())
        thawed = tuple(parameter.requires_grad for parameter in self.model.parameters())
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return count, tensors, plain, str(structure), modes, thawed, autocast

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

    def _own_buffers(self) -> Buffers | None:
        """Return the buffers of this rank's stages; those of the first pipeline are used on all."""
        channel, place, rank = self.world.channel, dist.get_rank(self.group.group), self.world.placement.rank
        if channel is None or self.world.layout.size == 1:
            return None
        name = f"{self.world.count('model in stages')} of stage {place}"
        return Buffers(self.model, rank, channel, name, source=place, holds=is_here)

    def sync_buffers(self, how: str) -> None:
        """Give all pipelines the same buffers: those of the first one, or the mean."""
        self.placement.sync_buffers(self.world.layout, how)

    def _scale(self) -> float:
        """Return the factor for losses in their backwards, so that float16 gradients do not vanish."""
        scaling = self.world.part(LossScaling)
        if scaling.scaler is None:
            return 1.0
        scaling.update()
        return scaling.scaler.get_scale()

    def _lay(self, found: Gradients, factor: torch.Tensor | None) -> None:
        """Add new gradients to those of the parameters, and average them with the other pipelines."""
        self.placement.sum_shared(found)
        if found and factor is not None:
            foreach("mul_", list(found.values()), float(factor))
        for parameter, grad in found.items():
            grad = hooked(parameter, grad)
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        for parameter in self.model.parameters():
            if isinstance(parameter, RemoteTensor):
                parameter.has_gradient = parameter.requires_grad
        if self.syncs and self.world.layout.size > 1:
            self.placement.average(self.world.layout)
        if self.syncs and self.world.part(LossScaling).scaler is not None:
            self.placement.spread_overflow()
        for parameter in found:
            call_after_accumulation(parameter)

    def exchanges(self, nodes: Iterable[Any]) -> bool:
        """Return whether one of these graph nodes is a pass through the stages."""
        return any(is_of_pass(node) for node in nodes)

    def refuse_copy(self) -> NoReturn:
        """Refuse to copy or pickle the model, as its remote parameters do."""
        refuse_copy()


class PipelineModel(UncopiedModel):
    """Model of which this rank has the blocks of its stages."""

    def __init__(self, routing: PipelineRouting) -> None:
        super().__init__(routing, sync_buffers=routing.sync_buffers)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that the compiler leaves as it is, where the user's code is compiled around it."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _target(method: Method, args: Any, kwargs: Any) -> Any:
    """Return the last argument with a tensor in the order of a method's signature, however the call is written."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    given: list[Any] = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is not inspect.Parameter.VAR_KEYWORD:
            given += value if kind is inspect.Parameter.VAR_POSITIONAL else [value]
    given = given or list(kwargs.values())
    return next((each for each in reversed(given) if tensors_in(each)), given[-1])


def _batch_size(given: Any) -> int:
    """Return the length of the first tensor that has a dimension."""
    return next((len(tensor) for tensor in tensors_in(given) if tensor.dim()), 1)


def _part(given: Any, batch: int, number: int, size: int) -> Any:
    """Return the arguments of a microbatch: tensors as long as the batch are cut, others are passed whole."""
    piece = slice(number * size, (number + 1) * size)
    return map_tensors(lambda tensor: tensor[piece] if tensor.dim() and len(tensor) == batch else tensor, given)
