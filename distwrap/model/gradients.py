"""Watch that gradients go through DDP's reducer: a few hooks a model, and two notes a step.

DDP prepares its reducer in ``forward``, and averages in the one backward that follows. A backward for which nothing was
prepared leaves each rank with its own gradient, and says nothing: after a forward of the bare model, a second backward
through one forward, a ``no_sync()`` that covers only one of the two.

Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from distwrap._internals.torch import (
    current_backward,
    is_averaging,
    names_ddp_ignores,
    prepare_another_average,
    remove_ddp_hooks,
)
from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_tree import tensors_in
from distwrap.errors import ModelError
from distwrap.group.world import current_world, say_once
from distwrap.model.checks import diagnosis
from distwrap.model.checks.drift import ModelWatch
from distwrap.model.wrapped_models import WrappedModels, routing_of

_PROBE_PARAMETERS = 4


class Average(Enum):
    """State of the average that a model's next backward takes."""

    NONE = auto()  # no forward has been, or its average is taken
    DUE = auto()  # a forward has prepared one
    LEFT_OUT = auto()  # the forward was in no_sync()


class Gradients:
    """Watch over the gradients of one wrapped model.

    Args:
        model: the wrapper; it is not kept alive.
        ddp: torch's ``DistributedDataParallel`` in it.

    Attributes:
        average: the state of the average that the next backward takes.
        on_average: called when a backward begins to take its average, while a method is running.
        trained: the names of the parameters that DDP averages, in its order.
        watch: told of averages, where the ranks' weights are compared.
    """

    def __init__(self, model: nn.Module, ddp: nn.parallel.DistributedDataParallel) -> None:
        self._model, self._ddp = weakref.ref(model), weakref.ref(ddp)
        self.average = Average.NONE
        self.on_average: Callable[[], None] | None = None
        self.watch: ModelWatch | None = None
        self._task: int | None = -1
        net = ddp.module
        self._names = {id(parameter): name for name, parameter in net.named_parameters()}
        ignored = names_ddp_ignores(net)
        named = [(name, parameter) for name, parameter in net.named_parameters() if name not in ignored]
        self.trained = [name for name, parameter in named if parameter.requires_grad]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in _probe_parameters(named)
        ]
        self._accumulators = [(parameter, _accumulator(parameter)) for _, parameter in named if parameter.requires_grad]
        self._handles += refuse_unfreezing((name, p) for name, p in named if not p.requires_grad)
        weakref.finalize(model, _remove, self._handles).atexit = False

    def check_place(self) -> None:
        """Refuse parameters that were moved or converted since: autograd then forgets DDP's hooks.

        Raises:
            ModelError: names the first one.
        """
        for parameter, accumulator in self._accumulators:
            if parameter.requires_grad and _accumulator(parameter) is not accumulator:
                raise ModelError(
                    f"the parameter {self._names[id(parameter)]!r} has been moved, or has changed its type, "
                    "since wrap_model(), so that DDP no longer averages its gradient, and each rank would "
                    "train a model of its own (DW104). Move the model before wrap_model(), or wrap again: model = "
                    "wrap_model(unwrap_model(model))."
                )

    def is_in_backward(self) -> bool:
        """Return whether this thread runs a backward whose average is prepared, as where checkpointing recomputes."""
        if not in_backward():
            return False
        ddp = self._ddp()
        return self.average is not Average.NONE or (ddp is not None and is_averaging(ddp, otherwise=True))

    def knows(self, parameter: torch.Tensor) -> bool:
        """Return whether the model had this parameter when it was wrapped."""
        return id(parameter) in self._names

    def forget(self) -> None:
        """Take the hooks away, and DDP's: the model is wrapped anew, or its process group is gone."""
        _remove(self._handles)
        ddp = self._ddp()
        if ddp is not None:
            remove_ddp_hooks(ddp)

    def repeat(self, outputs: Any) -> None:
        """Let each of several forwards have a backward of its own: prepare anew when one comes through these outputs.

        For the second and later forwards without a backward between them, as in a GAN's step.
        """
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._prepare)  # type: ignore[no-untyped-call]

    def _prepare(self, grad: torch.Tensor) -> None:
        ddp: Any = self._ddp()
        if self.average is not Average.NONE or ddp is None or not ddp.require_backward_grad_sync:
            return
        if not ddp.needs_outputs and not is_averaging(ddp, otherwise=False):  # else it is of this very backward
            prepare_another_average(ddp)
            self.average = Average.DUE

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Check that an average is due; runs in a backward, once for each of a few parameters."""
        task = current_backward()
        if task == self._task is not None:
            return
        self._task = task
        model, ddp = self._model(), self._ddp()
        if model is None or ddp is None:
            return
        syncs = ddp.require_backward_grad_sync
        if self.average is Average.DUE:
            self.average = Average.NONE
            if self.watch is not None:
                self.watch.average()
            if not syncs:
                say_once(
                    "no_sync",
                    "a backward in no_sync() exchanges gradients all the same, because its forward, or an "
                    "earlier forward without a backward, was outside of no_sync(). Put both inside, or loop "
                    "over distwrap.accumulate().",
                )
            if self.on_average is not None:
                self.on_average()
        elif self.average is Average.LEFT_OUT:
            if syncs:
                raise ModelError(diagnosis.flipped(model))
        elif syncs and not self._is_expected(model, ddp, task):
            raise ModelError(diagnosis.skipped(model, getattr(routing_of(model), "method", "")))

    def _is_expected(self, model: nn.Module, ddp: nn.parallel.DistributedDataParallel, task: int | None) -> bool:
        if task is None or (ddp.static_graph and self.on_average is None):
            return True  # it may come back to a parameter in a backward within the backward
        return is_averaging(ddp, otherwise=True) or _averaged_elsewhere(model, task)

    def averaged(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients DDP averages, in its order."""
        return [parameter for parameter, _ in self._accumulators]


def refuse_unfreezing(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Any]:
    """Refuse from now on a gradient of parameters that are frozen as the model is wrapped; return the hooks' handles.

    A parameter that another wrapped model averages may have one.
    """

    def on_gradient(name: str, parameter: torch.Tensor) -> None:
        watches = current_world().part(WrappedModels).gradients()
        if not any(parameter is own for _, other in watches for own in other.averaged()):
            raise ModelError(
                f"the parameter {name!r} was frozen when wrap_model() was called, and has a gradient now, "
                "which DDP does not average, so that it would differ between the ranks. Set requires_grad "
                "before wrap_model(), or wrap again: model = wrap_model(unwrap_model(model))."
            )

    handles = []
    for name, parameter in parameters:
        # The hook needs a tensor that requires a gradient, and stays where it no longer does.
        with suppress(RuntimeError):
            parameter.requires_grad_(True)
            try:
                handles.append(parameter.register_post_accumulate_grad_hook(partial(on_gradient, name)))  # type: ignore[no-untyped-call]
            finally:
                parameter.requires_grad_(False)
    return handles


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return autograd's node that adds to a parameter's gradient; DDP's hook is on it."""
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn
        return node.next_functions[0][0] if node is not None else None


def _probe_parameters(named: list[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
    """Choose parameters that hardly any backward leaves out: the first of each child, and few of these."""
    first: dict[str, nn.Parameter] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            first.setdefault(name.split(".")[0], parameter)
    return list(first.values())[:: max(1, -(-len(first) // _PROBE_PARAMETERS))]


def _averaged_elsewhere(model: nn.Module, task: int) -> bool:
    """Return whether another wrapped model that shares parameters with this one takes the average in this backward."""
    own = set(map(id, model.parameters()))
    return any(
        other is not model
        and (gradients._task == task or gradients.average is Average.DUE)
        and not own.isdisjoint(map(id, other.parameters()))
        for other, gradients in current_world().part(WrappedModels).gradients()
    )
