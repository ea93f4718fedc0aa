"""Wrapped models: in one process, under DDP, or trained alone. What can be decided is decided when wrapping."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parallel.parallel_apply import parallel_apply

from distwrap._internals.torch import DDPSteps, import_compiler
from distwrap.errors import ModelError
from distwrap.group.world import say_once
from distwrap.model.buffers import Buffers
from distwrap.model.checks import diagnosis
from distwrap.model.checks.in_sync import statistics_of
from distwrap.model.forward_routing import ForwardMethods, MethodCall, Routing, has_gradient
from distwrap.model.gradients import Average, Gradients
from distwrap.model.wrapped_models import ModelProxy, handle_of
from distwrap.precision import InPrecision
from distwrap.protocols import Wrapping


class LocalRouting(Routing):
    """Forward in this process alone, under autocast, or on an accelerator."""

    def __init__(self, module: nn.Module, in_precision: InPrecision, forward_methods: ForwardMethods) -> None:
        super().__init__(module, in_precision, forward_methods)
        self.forward = module if self._plain else self._placed(module)

    def _routed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return method if self._plain else super()._routed(name, method)


class LocalModel(ModelProxy):
    """A model of this one process, under autocast, or on an accelerator, with a `LocalRouting`."""


class DataParallelRouting(Routing):
    """Forward over several devices of this process."""

    def __init__(
        self, module: nn.Module, in_precision: InPrecision, device_ids: Sequence[int], forward_methods: ForwardMethods
    ) -> None:
        super().__init__(module, in_precision, forward_methods)
        self.forward = self.inner = _DataParallelInPrecision(module, in_precision, device_ids)

    def looked_up(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return (self.dressed or self.forward) if name == "forward" else super().looked_up(name, method)

    def _moved(self, arguments: Any, objects: Literal["changed", "left"] = "changed") -> Any:
        return arguments  # which DataParallel divides among the devices


class DataParallelModel(ModelProxy, DataParallel):  # type: ignore[type-arg]
    """A `DataParallel` over several devices of this process, with a `DataParallelRouting`."""


class _DataParallelInPrecision(DataParallel):  # type: ignore[type-arg]
    """torch's wrapper inside a `DataParallelModel`."""

    def __init__(self, module: nn.Module, in_precision: InPrecision, device_ids: Sequence[int]) -> None:
        super().__init__(module, device_ids=list(device_ids))
        self._in_precision: Any = in_precision

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas; autocast is a thread's own, so each gets it anew."""
        run = [self._in_precision(replica) for replica in replicas]
        return parallel_apply(run, inputs, kwargs, self.device_ids[: len(replicas)])


class AveragingModel(DDPSteps):
    """torch's wrapper inside a `DistributedModel`, whose names are its own.

    A forward is between its `begin` and its `end`, whichever method runs it.

    Args:
        module: the user's model, on its device.
        buffers: those of a `DistributedModel`.
        **ddp_kwargs: for ``DistributedDataParallel``.

    Attributes:
        trains_alone: whether the gradients of a `ReplicaModel` are left alone for now.
        needs_outputs: whether DDP must see what a forward returns.
        gradients: the watch over them, once there is one.
    """

    trains_alone = False
    needs_outputs: bool
    gradients: Gradients

    def __init__(self, module: nn.Module, buffers: Buffers | None, **ddp_kwargs: Any) -> None:
        broadcast = ddp_kwargs.pop("broadcast_buffers", buffers is None)
        super().__init__(module, **ddp_kwargs)  # gives every rank rank 0's buffers, once
        if "forward_sync_buffers" not in ddp_kwargs:
            self.broadcast_buffers = broadcast
        needs_outputs = bool(self.find_unused_parameters or self.static_graph)
        # The module stands here beside its place among the children, where each look-up costs a microsecond.
        self.__dict__.update(module=module, needs_outputs=needs_outputs)

    def begin(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Do what DDP does before the model's forward with gradients on, and return that forward's arguments."""
        gradients, watch = self.gradients, self.gradients.watch
        if watch is not None and gradients.average is Average.DUE:
            watch.forward_again()
        elif watch is not None and watch.averages == 1:
            watch.has_regrouped |= self.static_graph or not self.find_unused_parameters
        try:
            return self.begin_forward(*args, **kwargs)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise diagnosis.unfinished(error, self.module, gradients.trained)  # noqa: B904 - which knows its cause

    def end(self, output: Any, again: bool) -> Any:
        """Do what DDP does after that forward, and return its output.

        Args:
            output: of the forward; ``None`` where DDP need not see it, and the method is still running.
            again: whether the forward before it has had no backward yet.
        """
        gradients = self.gradients
        try:
            output = self.end_with(output) if self.needs_outputs else self.end_forward(output)
        except RuntimeError as error:
            raise diagnosis.unfinished(error, self.module, gradients.trained)  # noqa: B904 - which knows its cause
        # A forward in no_sync() does not take back what one outside of it has prepared, whose backward never came.
        gradients.average = Average.DUE if again or self.require_backward_grad_sync else Average.LEFT_OUT
        if again:
            gradients.repeat(output)
        return output

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what torch's ``Join`` does for a rank that is out of data, and when all are."""
        hook: Any = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        end, gradients = hook.post_hook, self.gradients

        def post_hook(is_last_joiner: bool) -> None:
            end(is_last_joiner)
            if gradients.watch is not None:  # all ranks are together again
                gradients.watch.begin_generation()

        hook.post_hook = post_hook
        return hook  # type: ignore[no-any-return]


class DistributedRouting(Routing):
    """Forward through DDP, which averages the gradients.

    Without gradients the bare model runs: nothing is exchanged, so evaluation needs no lock-step.

    Args:
        inner: torch's wrapper.
        wrapping: precision, device and methods.
        buffers: those of a `DistributedModel`.
        gradients: the watch over them.
    """

    inner: AveragingModel

    def __init__(
        self, inner: AveragingModel, wrapping: Wrapping, buffers: Buffers | None, gradients: Gradients
    ) -> None:
        super().__init__(inner.module, wrapping.in_precision, wrapping.forward_methods)
        self.inner, self.buffers, self.gradients = inner, buffers, gradients
        if not self._plain:
            self.forward = self._placed(self.forward)  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with gradients on, between DDP's steps."""
        if self.method:
            return self.module(*args, **kwargs)  # by whose call the method begins
        ddp, again = self.inner, self.gradients.average is Average.DUE
        if again and self.gradients.is_in_backward():
            return self.module(*args, **kwargs)  # where checkpointing recomputes
        if torch.is_grad_enabled():
            args, kwargs = ddp.begin(*args, **kwargs)
            output = ddp.end(ddp.run_module(*args, **kwargs), again)
        else:
            output = self.module(*args, **kwargs)
        if self.buffers is not None and self.module.training:
            self.buffers.count_forward()
        return output

    def _takes_part(self) -> bool:
        return torch.is_grad_enabled() or not self._plain

    def _begin(self, call: MethodCall) -> bool:
        if not call.begun:
            super()._begin(call)
        gradients = self.gradients
        if not torch.is_grad_enabled() or gradients.is_in_backward():
            return True  # a teacher's forward in no_grad(), or a checkpointed one again: the student's may come yet
        if not call.prepared:
            call.inside.callback(setattr, gradients, "on_average", None)
        gradients.on_average = call.watch  # a method may be a whole loop
        self._prepare(call)
        return False

    def _prepare(self, call: MethodCall) -> None:
        """Do what comes before the forward, and after it where DDP need not see its outputs: a backward may come."""
        call.prepared, call.again = True, self.gradients.average is Average.DUE
        self.inner.begin(None)
        if self.buffers is not None and self.module.training:
            self.buffers.count_forward()
        if not self.inner.needs_outputs:
            self.inner.end(None, call.again)

    def _end(self, output: Any, call: MethodCall) -> Any:
        gradients, ddp = self.gradients, self.inner
        if torch.is_grad_enabled():
            none_due = gradients.average is Average.NONE or (
                gradients.average is Average.LEFT_OUT and ddp.require_backward_grad_sync
            )
            if not call.prepared and none_due and has_gradient(output):
                self._prepare(call)  # it has used parameters without calling a module
            if call.prepared and ddp.needs_outputs:
                output = ddp.end(output, call.again)
            elif call.again and gradients.average is Average.DUE:
                gradients.repeat(output)
        return self._in_precision.outputs(output) if call.begun or call.prepared else output

    def train(self, mode: bool, *, pauses: bool) -> None:
        if pauses and self.buffers is not None:
            self.buffers.pause(waits=not self.inner.trains_alone)
        elif pauses and self.inner.broadcast_buffers and statistics_of(self.model):
            say_once(
                "own statistics",
                f"eval() sees this rank's own running statistics of {type(self.model).__name__}: here DDP takes "
                "over rank 0's in forwards with gradients alone. Call sync_buffers(model) on all ranks before.",
            )
        if pauses and self.gradients.watch is not None:
            self.gradients.watch.pause()
        if mode:
            self.gradients.check_place()


class DistributedModel(ModelProxy, DistributedDataParallel):
    """A `DistributedDataParallel` by its type, which answers like the user's model; DDP itself is inside.

    Args:
        module: the user's model, on its device.
        wrapping: precision, device and methods.
        buffers: by which the ranks take over rank 0's when training pauses; ``None`` where DDP is to broadcast them at
            each forward, or nobody.
        **ddp_kwargs: for ``DistributedDataParallel``.
    """

    _distwrap_ddp: type[AveragingModel] = AveragingModel

    def __init__(self, module: nn.Module, wrapping: Wrapping, buffers: Buffers | None, **ddp_kwargs: Any) -> None:
        import_compiler()
        inner = self._distwrap_ddp(module, buffers, **ddp_kwargs)
        inner.__dict__["gradients"] = gradients = Gradients(self, inner)
        routing = DistributedRouting(inner, wrapping, buffers, gradients)
        super().__init__(routing, gradients=gradients)

    def _distwrap_moved(self) -> None:
        self._distwrap_routing.gradients.check_place()

    def _distwrap_release(self) -> None:
        """Let go of the process group: from now on this is the wrapper of the bare model."""
        routing = self._distwrap_routing
        methods = "auto" if routing._forward_methods is None else routing._forward_methods
        self._distwrap_go_through(LocalRouting(routing.module, routing._in_precision, methods), LocalModel)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        _refuse_change(self.module, fn)
        return super()._apply(fn, *args, **kwargs)


class AveragingReplica(AveragingModel):
    """torch's wrapper inside a `ReplicaModel`."""

    _syncs = True  # as DDP sets it in no_sync()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward averages gradients, as DDP reads it."""
        return self._syncs and not self.trains_alone

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._syncs = value


class ReplicaModel(DistributedModel):
    """A `DistributedModel` whose gradients DDP leaves alone while it ``trains_alone``, as in its ``no_sync()``.

    Prints a notice, once a run, when eval() or state_dict() sees weights that differ between ranks.
    """

    _distwrap_ddp = AveragingReplica

    def train(self, mode: bool = True) -> Any:
        """Set the training flag."""
        if self.training and not mode:
            _note_own_weights(self, "eval()")
        return super().train(mode)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own state dict, of this rank's weights."""
        _note_own_weights(self, "state_dict()")
        return super().state_dict(*args, **kwargs)


def _note_own_weights(model: ReplicaModel, where: str) -> None:
    handle = handle_of(model)
    if handle is not None and handle.exchange is not None and not handle.exchange.alike:
        say_once(
            "own weights",
            f"{where} sees this rank's own weights, and under this comm= each rank has others. For the mean of "
            f"all: with distwrap.consolidate(model): ...",
        )


def _refuse_change(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse a change of the parameters' device or type, which DDP would not notice."""
    seen: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, parameter in model.named_parameters():
        seen.setdefault((parameter.dtype, parameter.device), name)
    for (dtype, device), name in seen.items():
        after = fn(torch.empty(0, dtype=dtype, device=device))
        if (after.dtype, after.device) != (dtype, device):
            raise ModelError(
                f"this would turn the parameter {name!r} from {dtype} on {device} into {after.dtype} on "
                f"{after.device} after wrap_model(): DDP would go on with the old tensors, and each rank would "
                "train a model of its own (DW104). Do it before wrap_model(), which puts the model on this rank's "
                "device; save() and load() need no .cpu()."
            )
