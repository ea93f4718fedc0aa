"""Gradients that a pass has computed, and that the backward of the loss stores in the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distwrap._internals.torch_autograd import without_hooks
from distwrap._internals.torch_tree import map_tensors
from distwrap.errors import ModelError

Gradients = dict[nn.Parameter, torch.Tensor]
HandOn = Callable[[list[Any]], None]


@contextmanager
def apart(parameters: list[nn.Parameter]) -> Iterator[Gradients]:
    """Collect the gradients of a ``with`` without touching existing gradients or calling hooks."""
    before = [parameter.grad for parameter in parameters]
    found: Gradients = {}
    try:
        for parameter in parameters:
            parameter.grad = None
        with without_hooks(parameters):
            yield found
        found.update((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


class Results(torch.autograd.Function):
    """Results of a pass through the stages, whose backward passes on their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hand_on: HandOn, *values: Any) -> Any:
        """Return the results.

        Args:
            ctx: torch's context.
            anchor: a tensor that requires a gradient, so that the results do too.
            hand_on: called with the gradients of the results; ``None`` for one that the loss does not use.
            *values: the numbers of the results.
        """
        ctx.hand_on = hand_on
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.hand_on is None:
            raise ModelError(
                "a second backward() of one pass is not possible under strategy='pipeline', since the first "
                "one frees the graph. Compute the loss again, or add losses up before one backward()."
            )
        hand_on, ctx.hand_on = ctx.hand_on, None
        hand_on(list(grads))
        return None, None, *(None for _ in grads)


def linked(result: Any, tensors: list[torch.Tensor], hand_on: HandOn) -> Any:
    """Return a result in which some tensors, which have no graph, pass on their gradients."""
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        found = Results.apply(anchor, hand_on, *tensors)  # type: ignore[no-untyped-call]
    instead = {id(tensor): new for tensor, new in zip(tensors, found, strict=True)}
    return map_tensors(lambda tensor: instead.get(id(tensor), tensor), result)


def backward_of(tensors: list[torch.Tensor], grads: list[Any], *, retain_graph: bool = False) -> None:
    """Run the backward of tensors, without those that have no gradient, from which none goes on, not even zeros."""
    used = [(tensor, grad) for tensor, grad in zip(tensors, grads, strict=True) if grad is not None]
    if used:
        torch.autograd.backward([each for each, _ in used], [grad for _, grad in used], retain_graph=retain_graph)


def is_of_pass(node: Any) -> bool:
    """Return whether a graph node is a pass through the stages."""
    return type(node).__name__ == f"{Results.__name__}Backward"
