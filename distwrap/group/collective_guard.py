"""Code that only some ranks run: a collective in it is an error at once, where it would else wait forever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group  # type: ignore[attr-defined,unused-ignore]
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from distwrap.errors import CollectiveInRankZeroError
from distwrap.group.world import World, current_world

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_COLLECTIVES = ("send", "recv", "wait_tensor")  # between two ranks, or for one that was begun before


@contextmanager
def guard_collectives(name: str) -> Iterator[None]:
    """Refuse collectives for the time of a ``with``: ours, a wrapped model's forward, and torch's own.

    The cost is in the body alone: a dispatch mode looks at each operator there, and wrapped models get another forward
    for that time.

    Args:
        name: of the function whose body it is, for the error.
    """
    world = current_world()
    if world.placement.world_size == 1 or world.solo:
        yield
        return
    with ExitStack() as stack:
        world.solo = name
        stack.callback(setattr, world, "guard_collectives", "")
        for model in world.models:
            _guard(model, world, stack)
        stack.enter_context(_Watched())  # type: ignore[no-untyped-call]
        yield


def check_collectives_allowed(what: str) -> None:
    """Refuse a collective where only some ranks are.

    Raises:
        CollectiveInRankZeroError: they are.
    """
    world = current_world()
    if world.solo:
        raise CollectiveInRankZeroError(
            f"rank {world.placement.rank} called {what} inside {world.solo}, where the other ranks are not: they would "
            f"never come to it, and all would wait. Call it outside, on every rank, and let one rank do the rest."
        )


def _guard(model: torch.nn.Module, world: World, stack: ExitStack) -> None:
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and model.training:
            check_collectives_allowed(f"the forward of the wrapped {type(model.module).__name__} with gradients on")
        return plain(*args, **kwargs)

    model.__dict__["forward"] = forward
    stack.callback(model.__dict__.pop, "forward", None)


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator of the body; those of torch.distributed are in the namespace c10d."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in _NAMESPACES:
            name = func.__name__.split(".")[0].strip("_")
            if not name.startswith(_NO_COLLECTIVES) and _with_others(args):
                check_collectives_allowed(f"torch.distributed's {name}()")
        return func(*args, **(kwargs or {}))


def _with_others(args: tuple[Any, ...]) -> bool:
    """Say whether the operator's group has more than this one rank."""
    for arg in args:
        with contextlib.suppress(RuntimeError, TypeError, AttributeError):  # another argument than the group
            if isinstance(arg, torch.ScriptObject):
                return int(ProcessGroup.unbox(arg).size()) > 1
            if isinstance(arg, str):
                return int(_resolve_process_group(arg).size()) > 1  # type: ignore[arg-type,unused-ignore]
    return True
