"""Activations that are computed again in the backward: torch's checkpointing around each unit.

Source: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distwrap._internals.torch_sharding import products


def recompute(units: list[nn.Module], *, selective: bool) -> None:
    """Let units compute their activations again in the backward; selectively, all but products of matrices."""
    kept = products()

    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keep)
    options: dict[str, Any] = {"context_fn": contexts} if selective else {}
    for unit in units:
        unit.forward = _recomputed(unit.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run
