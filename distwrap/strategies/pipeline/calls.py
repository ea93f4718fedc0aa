"""Calls of a model's methods: what a run depends on, and which arguments are refused."""

from __future__ import annotations

import enum
import inspect
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from distwrap._internals.torch_tree import tensors_in, tree_flatten
from distwrap.errors import ModelError
from distwrap.strategies.pipeline.absent import Absent, is_in_step
from distwrap.strategies.pipeline.microbatches import batch_size

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_PLAIN = (bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, slice, enum.Enum)


class Call(NamedTuple):
    """Everything except tensors on which a run of a method depends; equal on all ranks.

    Attributes:
        name: the name of the method.
        has_gradients: whether gradients are enabled.
        trains: for each module, whether it is in training mode, and whether it has dropout.
        autocast: the type of the caller's own autocast, or ``False``.
        thawed: which parameters are not frozen.
        others: the nesting of the arguments with those that are not tensors, and the switches of the model.
    """

    name: str
    has_gradients: bool
    trains: bytes
    autocast: torch.dtype | Literal[False]
    thawed: bytes
    others: str


class Latest(dict[_Key, _Value]):
    """Dictionary that drops its oldest entries, so that new arguments in each step do not fill the memory.

    Args:
        size: the most entries to keep.
    """

    def __init__(self, size: int = 64) -> None:
        self._size = size

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._size:
            del self[next(iter(self))]


def call_of(name: str, given: Any, model: nn.Module, device: str) -> Call:
    """Return the properties of a method's call on which its run depends.

    Args:
        name: the name of the method.
        given: its arguments.
        model: the model of the method.
        device: the type of the model's device.
    """
    leaves, structure = tree_flatten(given)
    batch = batch_size(given)
    others = [_kind_of(leaf, batch) for leaf in leaves]
    modes = [_modes_of(module) for module in (model, *model.children())]
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    trains = bytes(_switched(module) for module in model.modules())
    thawed = bytes(parameter.requires_grad for parameter in model.parameters())
    return Call(name, torch.is_grad_enabled(), trains, autocast, thawed, f"{others} in {structure}, {modes}")


def _kind_of(leaf: Any, batch: int) -> str:
    """Return the properties of an argument on which a run depends, without texts that may contain an address."""
    if isinstance(leaf, torch.Tensor):
        return "rows" if leaf.dim() and len(leaf) == batch else "tensor"
    if isinstance(leaf, float):
        return "float"
    if isinstance(leaf, _PLAIN):
        return repr(leaf)
    if isinstance(leaf, partial):
        return str([_kind_of(each, batch) for each in (leaf.func, *leaf.args, *leaf.keywords.items())])
    if isinstance(leaf, tuple):
        return str([_kind_of(each, batch) for each in leaf])
    name = getattr(leaf, "__qualname__", "")
    return f"{getattr(leaf, '__module__', '')}.{name}" if name else f"{type(leaf)} {_modes_of(leaf)}"


def _switched(module: nn.Module) -> int:
    chance = vars(module).get("p")  # a dropout's, which draws if it is above 0
    return module.training + 2 * (isinstance(chance, float) and chance > 0)


def _modes_of(thing: Any) -> list[tuple[str, Any]]:
    """Return the switches of an object, such as the ``reduction`` of a criterion."""
    held = getattr(thing, "__dict__", {})
    return [(name, value) for name, value in held.items() if isinstance(value, (bool, str, enum.Enum))]


def refuse_parts(name: str) -> None:
    """Refuse a pass in an optimizer's step that has read gradients, as SAM does."""
    if Absent.asked and is_in_step(inspect.currentframe()):
        raise ModelError(
            f"an optimizer's step runs {name}() after it has read the gradients, as for a norm over all of "
            "them, and under strategy='pipeline' each rank has only those of its stage. Use an optimizer that "
            "steps each parameter by itself, as AdamW, or strategy='ddp'."
        )


def refuse_trained(name: str, given: Any) -> None:
    """Refuse arguments that require a gradient."""
    if any(tensor.requires_grad for tensor in tensors_in(given)):
        raise ModelError(
            f"{name}() got a tensor that requires a gradient, and under strategy='pipeline' no gradient goes "
            "back to the inputs of the model. Compute the tensor in the model's own method, or detach() it; or "
            "use strategy='fsdp'."
        )
