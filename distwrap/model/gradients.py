"""Watch that gradients go through DDP's reducer: a few hooks a model, and two notes a step.

DDP prepares its reducer in ``forward``, and averages in the one backward that follows. A backward for which nothing was
prepared leaves each rank with its own gradient, and says nothing: after a forward of the bare model, a second backward
through one forward, a ``no_sync()`` that covers only one of the two.

Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
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
from distwrap._internals.torch_tree import tree_leaves
from distwrap.errors import ModelError
from distwrap.group.world import current_world, say_once
from distwrap.model import diagnosis
from distwrap.model.buffers import Buffers
from distwrap.model.wrapped_models import WrappedModels

_SENTINELS = 4


class Average(Enum):
    """State of the average that a model's next backward takes."""

    NONE = auto()  # no forward has been, or its average is taken
    DUE = auto()  # a forward has prepared one
    LEFT_OUT = auto()  # the forward was in no_sync()


class Gradients:
    """Watch over the gradients of one wrapped model.

    Args:
        model: a ``DistributedDataParallel``; it is not kept alive.
        buffers: of the model, that count how many averages there were.

    Attributes:
        average: the state of the average that the next backward takes.
        on_average: called when a backward begins to take its average, while a method is running.
        trained: the names of the parameters that DDP averages, in its order.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel, buffers: Buffers | None) -> None:
        self._model = weakref.ref(model)
        self.average = Average.NONE
        self.on_average: Callable[[], None] | None = None
        self._buffers = buffers
        self._task: int | None = -1
        net = model.module
        self._names = {id(parameter): name for name, parameter in net.named_parameters()}
        ignored = names_ddp_ignores(net)
        named = [(name, parameter) for name, parameter in net.named_parameters() if name not in ignored]
        self.trained = [name for name, parameter in named if parameter.requires_grad]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in _sentinels(named)
        ]
        self._accumulators = [(parameter, _accumulator(parameter)) for _, parameter in named if parameter.requires_grad]
        for _, parameter in named:
            if not parameter.requires_grad and parameter.is_floating_point():
                self._watch_frozen(parameter)
        weakref.finalize(model, _remove, self._handles).atexit = False
        current_world().part(WrappedModels).gradients[model] = self

    def check_place(self) -> None:
        """Refuse parameters that were moved or converted since: autograd then forgets DDP's hooks.

        Raises:
            ModelError: names the first one.
        """
        for parameter, accumulator in self._accumulators:
            if _accumulator(parameter) is not accumulator:
                raise ModelError(
                    f"the parameter {self._names[id(parameter)]!r} has been moved, or changed its type, since "
                    f"wrap_model(), and DDP has lost it: the ranks would train apart. Move the model before "
                    f"wrap_model(), or wrap again: model = wrap_model(unwrap_model(model))."
                )

    def forget(self) -> None:
        """Take the hooks away, and DDP's: the model is wrapped anew, or its process group is gone."""
        _remove(self._handles)
        model = self._model()
        if model is not None:
            remove_ddp_hooks(model)

    def repeat(self, outputs: Any) -> None:
        """Let each of several forwards have a backward of its own: prepare anew when one comes through these outputs.

        For the second and later forwards without a backward between them, as in a GAN's step.
        """
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._prepare)  # type: ignore[no-untyped-call]

    def _prepare(self, grad: torch.Tensor) -> None:
        model = self._model()
        if self.average is not Average.NONE or model is None or not model.require_backward_grad_sync:
            return
        if not model._needs_outputs and not is_averaging(model, otherwise=False):  # else it is of this very backward
            prepare_another_average(model)
            self.average = Average.DUE

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Check that an average is due; runs in a backward, once for each of a few parameters."""
        task = current_backward()
        if task == self._task is not None:
            return
        self._task = task
        model = self._model()
        if model is None:
            return
        syncs = model.require_backward_grad_sync
        if self.average is Average.DUE:
            self.average = Average.NONE
            if self._buffers is not None:
                self._buffers.averages += 1
            if not syncs:
                say_once(
                    "no_sync",
                    "a backward in no_sync() exchanges gradients all the same, because its forward was outside. "
                    "Put both inside, or loop over distwrap.accumulate().",
                )
            if self.on_average is not None:
                self.on_average()
        elif self.average is Average.LEFT_OUT:
            if syncs:
                raise ModelError(diagnosis.flipped(model))
        elif syncs and not self._is_expected(model, task):
            raise ModelError(diagnosis.skipped(model, str(model._method)))

    def _is_expected(self, model: nn.parallel.DistributedDataParallel, task: int | None) -> bool:
        if task is None or (model.static_graph and self.on_average is None):
            return True  # it may come back to a parameter in a backward within the backward
        return is_averaging(model, otherwise=True) or _averaged_elsewhere(model, task)

    def _watch_frozen(self, parameter: torch.Tensor) -> None:
        # The hook needs a tensor that requires a gradient, and stays where it no longer does.
        with suppress(RuntimeError):
            parameter.requires_grad_(True)
            handle = parameter.register_post_accumulate_grad_hook(self._on_unfrozen)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        parameter.requires_grad_(False)

    def _on_unfrozen(self, parameter: torch.Tensor) -> None:
        """Refuse a gradient of a parameter that was frozen when the model was wrapped."""
        if self._model() is not None:
            raise ModelError(
                f"the parameter {self._names[id(parameter)]!r} was frozen when wrap_model() was called, and has a "
                f"gradient now, which DDP does not average: the ranks would train it apart. Set requires_grad before "
                f"wrap_model(), or wrap again: model = wrap_model(unwrap_model(model))."
            )


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return autograd's node that adds to a parameter's gradient; DDP's hook is on it."""
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn
        return node.next_functions[0][0] if node is not None else None


def _sentinels(named: list[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
    """Choose parameters that hardly any backward leaves out: the first of each child, and few of these."""
    first: dict[str, nn.Parameter] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            first.setdefault(name.split(".")[0], parameter)
    chosen = list(first.values())
    step = max(1, -(-len(chosen) // _SENTINELS))
    return chosen[::step]


def _averaged_elsewhere(model: nn.Module, task: int) -> bool:
    """Return whether another wrapped model that shares parameters with this one takes the average in this backward."""
    own = set(map(id, model.parameters()))
    return any(
        other is not model and gradients._task == task and not own.isdisjoint(map(id, other.parameters()))
        for other, gradients in current_world().part(WrappedModels).gradients.items()
    )
