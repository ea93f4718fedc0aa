"""Calls that are others for a time, and private names of torch for calls and hooks; all were seen in version 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_NONE = object()  # where an attribute is that of a base class
_CALLS = ("_call_impl", "_compiled_call_impl")


@contextmanager
def replaced(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes of modules and classes other values within a ``with``; what others put there meanwhile stays."""
    own = [vars(owner).get(name, _NONE) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, value), before in zip(reversed(changes), reversed(own), strict=True):
            if vars(owner).get(name) is not value:
                continue
            if before is _NONE:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def replace_calls(module: nn.Module, replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the call of a module, that is its forward with all hooks, or the compiled version of that.

    Relies on ``torch:nn.Module()._call_impl``, ``torch:nn.Module()._compiled_call_impl``.
    Without it: strategy="pipeline" cannot be used.
    """
    for name in _CALLS:
        if (call := getattr(module, name)) is not None:
            vars(module)[name] = replaced(call)


def put_back_calls(module: nn.Module, own: dict[str, Any]) -> None:
    """Restore the call of a module from its attributes before the replacement.

    Relies on ``torch:nn.Module()._call_impl``, ``torch:nn.Module()._compiled_call_impl``.
    Without it: as for replace_calls.
    """
    for name in _CALLS:
        vars(module).pop(name, None)
        if name in own:
            vars(module)[name] = own[name]
