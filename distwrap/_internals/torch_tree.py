"""Private names of torch's pytree, and functions for nestings of tensors.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from types import ModuleType, NoneType
from typing import Any, Literal

import torch

from distwrap.nesting import refilled

_pytree: Any = getattr(torch.utils, "_pytree", None)

_ATOMS = frozenset({int, float, complex, bool, str, bytes, NoneType, torch.Size, torch.dtype, torch.device})
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, type, ModuleType)
_DEPTH = 4  # most levels of objects within objects


def map_tensors(
    change: Callable[[Any], Any],
    value: Any,
    *,
    also: Callable[[Any], bool] | None = None,
    objects: Literal["copied", "changed", "left"] = "copied",
) -> Any:
    """Return a nesting with changed tensors; parts without a changed tensor are returned as they are.

    Goes into lists, tuples, dicts, classes that torch's pytree knows, other mappings, dataclasses and objects with
    attributes, but not into modules and optimizers.

    Relies on ``torch.utils._pytree:tree_flatten``, ``torch.utils._pytree:tree_unflatten``.
    Without it: AttributeError in forwards of other types than the model's, on devices and in checks.

    Args:
        change: called once with each tensor.
        value: a tensor, or a nesting of them.
        also: tells which other objects are passed to `change`.
        objects: ``"copied"``: objects with changed tensors are copied. ``"changed"``: they are changed in place, unless
            they are frozen. ``"left"``: as ``"changed"``, for dataclasses and mappings only.

    Example:
        >>> map_tensors(torch.neg, {"a": [torch.ones(1), "b"]})
        {'a': [tensor([-1.]), 'b']}
    """
    return change(value) if isinstance(value, torch.Tensor) else _Walk(change, also, objects).visit(value, _DEPTH)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nesting, each once.

    Relies on ``torch.utils._pytree:tree_flatten``.
    Without it: as for map_tensors.
    """
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


class _Walk:
    """Walk through a nesting, for `map_tensors`."""

    def __init__(self, change: Callable[[Any], Any], also: Callable[[Any], bool] | None, objects: str) -> None:
        self._change, self._also, self._objects = change, also, objects
        self._seen: dict[int, tuple[Any, Any]] = {}  # parts and their results; also ends cycles

    def visit(self, part: Any, depth: int) -> Any:
        kind = type(part)
        if kind in _ATOMS:
            return part
        if kind is dict:
            return refilled(part, [self.visit(item, depth) for item in part.values()])
        if kind is list or kind is tuple:
            return refilled(part, [self.visit(item, depth) for item in part])
        if (known := self._seen.get(id(part))) is not None:
            return known[1]
        self._seen[id(part)] = part, part
        if isinstance(part, torch.Tensor):
            result = self._change(part)
        elif isinstance(part, _CLOSED):
            return part
        else:
            result = self._change(part) if self._also is not None and self._also(part) else self._opened(part, depth)
        self._seen[id(part)] = part, result
        return result

    def _opened(self, part: Any, depth: int) -> Any:
        leaves, structure = tree_flatten(part, lambda inner: inner is not part)
        result, is_mapping = part, isinstance(part, Mapping)
        if isinstance(part, (list, tuple, dict)):
            items = part.values() if isinstance(part, dict) else part
            result = refilled(part, [self.visit(item, depth) for item in items])
        elif len(leaves) != 1 or leaves[0] is not part:  # a class that pytree knows
            new = [self.visit(leaf, depth) for leaf in leaves]
            return part if all(map(is_, new, leaves)) else tree_unflatten(new, structure)
        elif is_mapping and not hasattr(part, "__dict__"):  # a mapping proxy cannot be copied
            pairs = dict(part)
            changed = self.visit(pairs, depth)
            return part if changed is pairs else type(part)(changed)
        is_left = self._objects == "left" and not is_mapping and not hasattr(part, "__dataclass_fields__")
        return result if depth == 0 or is_left else self._with_attributes(part, result, depth - 1)

    def _with_attributes(self, part: Any, result: Any, depth: int) -> Any:
        changed = {name: new for name, held in _attributes(part) if (new := self.visit(held, depth)) is not held}
        if changed and result is part:
            if self._objects != "copied":
                with suppress(AttributeError):  # it is frozen
                    for name, new in changed.items():
                        setattr(part, name, new)
                    return part
            result = copy.copy(part)
        for name, new in changed.items():
            object.__setattr__(result, name, new)
        return result


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's own attributes, also those in slots."""
    yield from [*getattr(part, "__dict__", {}).items()]
    for cls in type(part).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            with suppress(AttributeError):  # it is not set, or its name is mangled
                yield name, getattr(part, name)


def tree_flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of a nesting, and the structure for `tree_unflatten`; `is_leaf` may add leaves.

    Relies on ``torch.utils._pytree:tree_flatten``.
    Without it: AttributeError in `gather` and the like.
    """
    return _pytree.tree_flatten(value, is_leaf)  # type: ignore[no-any-return]


def tree_unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Rebuild a nesting from its leaves and the structure that `tree_flatten` has returned.

    Relies on ``torch.utils._pytree:tree_unflatten``.
    Without it: as for tree_flatten.
    """
    return _pytree.tree_unflatten(leaves, structure)


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of a nesting.

    Relies on ``torch.utils._pytree:tree_leaves``.
    Without it: as for tree_flatten.
    """
    return _pytree.tree_leaves(value)  # type: ignore[no-any-return]
