"""What a call of a module runs, in whose place something else can run; all of it was seen in version 2.13 of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_CALLS = ("_call_impl", "_compiled_call_impl")


def replace_calls(module: nn.Module, replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what a call of a module runs: its forward with all hooks around it, or what was compiled of that.

    Relies on ``torch:nn.Module()._call_impl``, ``torch:nn.Module()._compiled_call_impl``.
    Without it: strategy="pipeline" cannot be used.
    """
    for name in _CALLS:
        if (call := getattr(module, name)) is not None:
            vars(module)[name] = replaced(call)


def put_back_calls(module: nn.Module, own: dict[str, Any]) -> None:
    """Let a module be called as it was when it had these attributes of its own.

    Relies on ``torch:nn.Module()._call_impl``, ``torch:nn.Module()._compiled_call_impl``.
    Without it: as for replace_calls.
    """
    for name in _CALLS:
        vars(module).pop(name, None)
        if name in own:
            vars(module)[name] = own[name]
