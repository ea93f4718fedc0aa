"""Recomputation of activations in the backward: torch's checkpointing around each unit.

Source: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distwrap._internals.torch_sharding import products
from distwrap.errors import ModelError
from distwrap.model.forward_routing import put_back_forward


def recompute(
    units: list[nn.Module], *, selective: bool, inside: Callable[[], AbstractContextManager[object]] | None = None
) -> Callable[[], None]:
    """Let units recompute their activations in the backward; selectively, all except matrix products.

    Args:
        units: the units of the model.
        selective: whether the results of matrix products are kept.
        inside: returns a context in which both computations run.

    Returns:
        A function that undoes this.

    Raises:
        ModelError: a unit cannot be recomputed selectively.
    """
    kept = products()

    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(unit: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = create_selective_checkpoint_contexts(keep) if selective else (nullcontext(), nullcontext())  # type: ignore[no-untyped-call]
        parts = [*unit.modules()]
        before = [(part, name, each.clone()) for part in parts for name, each in part.named_buffers(recurse=False)]
        return _Entered(inside and inside(), first), _Entered(_Buffers(before), inside and inside(), again)

    for unit in units if selective else ():
        _refuse_recurrent(unit)
    before = [(unit, vars(unit).get("forward")) for unit in units]
    for unit in units:
        unit.forward = _recomputed(unit.forward, partial(contexts, unit))

    def undo() -> None:
        for unit, forward in before:
            put_back_forward(unit, forward)

    return undo


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def _refuse_recurrent(unit: nn.Module) -> None:
    """Refuse layers that change the results of matrix products in place, which torch does not notice.

    Raises:
        ModelError: the unit has such a layer.
    """
    for name, module in unit.named_modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            raise ModelError(
                f"checkpointing='selective': {name or type(unit).__name__!r}, a {type(module).__name__}, changes the "
                "products that would be kept, and its gradients would be wrong. Use checkpointing=True."
            )


class _Entered:
    """Context of several others, which may be entered again, as in a second backward through a graph."""

    def __init__(self, *inside: AbstractContextManager[object] | None) -> None:
        self._inside = [each for each in inside if each is not None]

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for each in self._inside:
            self._stack.enter_context(each)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _Buffers:
    """Context in which modules have copies of their buffers as they were before a forward.

    A forward changes buffers, as spectral norm does, and what it computes from them. Its recomputation begins with the
    same numbers, and changes neither those of now, nor those that the graph holds.
    """

    def __init__(self, before: list[tuple[nn.Module, str, torch.Tensor]]) -> None:
        self._before = before

    def __enter__(self) -> None:
        self._now = [(module, name, getattr(module, name)) for module, name, _ in self._before]
        for module, name, buffer in self._before:
            setattr(module, name, buffer.clone())

    def __exit__(self, *error: Any) -> None:
        for module, name, buffer in self._now:
            setattr(module, name, buffer)
