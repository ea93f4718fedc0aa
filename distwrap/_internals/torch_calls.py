"""What a call of a module runs, in whose place something else can run; all of it was seen in version 2.13 of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
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


def run_new_pre_hooks(module: nn.Module, known: Collection[int], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run hooks before a module's forward that were registered when its call had begun, and return its arguments.

    Those that want keyword arguments are left out.

    Relies on ``torch:nn.Module()._forward_pre_hooks``, ``torch:nn.Module()._forward_pre_hooks_with_kwargs``.
    Without it: weights of the module that is called first, in a method that makes an engine of stage 3, are missing.
    """
    left_out = {*known, *getattr(module, "_forward_pre_hooks_with_kwargs", ())}
    for key, hook in list(getattr(module, "_forward_pre_hooks", {}).items()):
        if key not in left_out:
            result = hook(module, args)
            if result is not None:
                args = result if isinstance(result, tuple) else (result,)
    return args


def pre_hooks_of(module: nn.Module) -> set[int]:
    """Return the keys of the hooks before a module's forward.

    Relies on ``torch:nn.Module()._forward_pre_hooks``.
    Without it: as for `run_new_pre_hooks`.
    """
    return set(getattr(module, "_forward_pre_hooks", {}))
