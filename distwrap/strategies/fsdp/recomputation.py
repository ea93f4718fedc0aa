"""Recomputation of activations in the backward: torch's checkpointing around each unit.

Source: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distwrap._internals.torch import version_of
from distwrap._internals.torch_sharding import products
from distwrap.model.forward_routing import put_back_forward

_UNCOUNTED = ("running_mean", "running_var")  # torch's batch norm does not count their changes


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
    """
    kept = products()

    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = create_selective_checkpoint_contexts(keep) if selective else (nullcontext(), nullcontext())  # type: ignore[no-untyped-call]
        return _both(inside and inside(), first), _both(inside and inside(), again)

    before = [(unit, vars(unit).get("forward")) for unit in units]
    for unit in units:
        unit.forward = _recomputed(unit, unit.forward, contexts)

    def undo() -> None:
        for unit, forward in before:
            put_back_forward(unit, forward)

    return undo


@contextmanager
def _both(outer: AbstractContextManager[object] | None, inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer or nullcontext(), inner:
        yield


def _recomputed(
    unit: nn.Module, forward: Callable[..., Any], contexts: Callable[[], tuple[AbstractContextManager[Any], ...]]
) -> Callable[..., Any]:
    def counted_once() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = contexts()
        computed = _Computed(unit, first)
        return computed, _ComputedAgain(computed, again)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=counted_once, **kwargs)

    return run


class _Computed:
    """Forward of a unit, which may change buffers, such as BatchNorm's statistics."""

    def __init__(self, unit: nn.Module, inside: AbstractContextManager[Any]) -> None:
        self.unit, self._inside = unit, inside
        self.changed: list[str] = []

    def __enter__(self) -> None:
        self._versions = {name: version_of(buffer) for name, buffer in self.unit.named_buffers()}
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        for name, buffer in self.unit.named_buffers():
            if version_of(buffer) != self._versions.get(name) or name.endswith(_UNCOUNTED):
                self.changed.append(name)


class _ComputedAgain:
    """Recomputation of this forward, after which buffers are restored, as they already saw this batch."""

    def __init__(self, computed: _Computed, inside: AbstractContextManager[Any]) -> None:
        self._computed, self._inside = computed, inside

    def __enter__(self) -> None:
        buffers = dict(self._computed.unit.named_buffers())
        self._before = [(buffers[name], buffers[name].clone()) for name in self._computed.changed if name in buffers]
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        with torch.no_grad():
            for buffer, before in self._before:
                buffer.copy_(before)
