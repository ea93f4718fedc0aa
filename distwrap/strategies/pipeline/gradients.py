"""Gradients that a schedule has computed, which the backward of the loss lays down in the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distwrap.errors import ModelError

Gradients = dict[nn.Parameter, torch.Tensor]


@contextmanager
def apart(parameters: list[nn.Parameter]) -> Iterator[Gradients]:
    """Collect the gradients of a ``with`` apart from those that parameters have already."""
    before = [parameter.grad for parameter in parameters]
    found: Gradients = {}
    try:
        for parameter in parameters:
            parameter.grad = None
        yield found
        found.update((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


class LossOfSchedule(torch.autograd.Function):
    """Loss whose gradients are known; its backward hands on the factor by which they are to be multiplied."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, lay: Callable[[torch.Tensor], None]) -> Any:
        """Return the loss.

        Args:
            ctx: torch's.
            anchor: a parameter of the model, by which it is seen whose loss this is.
            loss: its value.
            lay: lays down the gradients.
        """
        ctx.lay = lay
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factor: Any) -> Any:
        if ctx.lay is None:
            raise ModelError(
                "a second backward() of one loss: under strategy='pipeline' its gradients were computed with it, and "
                "are used up. Compute the loss again, or add losses up before one backward()."
            )
        lay, ctx.lay = ctx.lay, None
        lay(factor[0])
        return None, None, None
