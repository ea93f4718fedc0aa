"""Undo changes of modules' attributes, such as caches, lists and counters, and of arguments after a trial run."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distwrap._internals.torch_tree import tensors_in

_TORCHS = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, deque)


class Numbers:
    """Numbers among the attributes of a model's modules, with detection of changes."""

    def __init__(self, net: nn.Module) -> None:
        self._modules = list(net.named_modules())
        self._seen = self._now()

    def changed(self) -> set[str]:
        """Return the names of the numbers that have changed since the last call."""
        before, self._seen = self._seen, self._now()
        return {name for name, value in self._seen.items() if name in before and before[name] != value}

    def _now(self) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: value
            for path, module in self._modules
            for name, value in vars(module).items()
            if type(value) in (int, float)
        }


class Snapshot:
    """Copy of the attributes of a model's modules, and of the arguments of a method.

    Args:
        net: the model.
        given: the arguments.
    """

    def __init__(self, net: nn.Module, given: Any = ()) -> None:
        self._attributes = [(vars(module), dict(vars(module))) for module in net.modules()]
        held = [value for own, _ in self._attributes for name, value in own.items() if name not in _TORCHS]
        containers = [value for value in held if type(value) in _CONTAINERS] + list(_containers_in(given))
        self._contents = [(container, copy.copy(container)) for container in containers]
        self._tensors = [(tensor, tensor.clone()) for tensor in tensors_in(given)]

    def restore(self) -> None:
        """Restore all of them."""
        for own, kept in self._attributes:
            for name in own.keys() - kept.keys():
                del own[name]
            own.update((name, value) for name, value in kept.items() if own.get(name) is not value)
        for container, items in self._contents:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(items)
        for tensor, numbers in self._tensors:
            if not torch.equal(tensor, numbers):
                tensor.copy_(numbers)


@contextmanager
def kept_attributes(net: nn.Module) -> Iterator[Numbers]:
    """Restore the attributes of all modules after a ``with``, with the contents of lists, dicts and sets."""
    before = Snapshot(net)
    try:
        yield Numbers(net)
    finally:
        before.restore()


def _containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        if not isinstance(value, tuple):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers_in(item)
