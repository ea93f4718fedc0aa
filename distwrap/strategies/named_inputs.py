"""Backwards that name what they are for, as ``backward(inputs=…)``: an exchange hands on gradients without a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from distwrap._internals.torch_autograd import look_at_backwards, nodes_of
from distwrap.errors import ModelError
from distwrap.group.world import RunPart, World


class Exchanging(Protocol):
    """A model whose parameters get their gradients from an exchange, and not from autograd."""

    @property
    def model(self) -> nn.Module:
        """The user's."""

    def exchanges(self, nodes: Iterable[Any]) -> bool:
        """Return whether autograd hands gradients over to the exchange at one of the nodes of a graph."""


class NamedInputs(RunPart):
    """Look at each backward of a run that names what it is for.

    Attributes:
        models: those that are looked for, while somebody holds them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.models: WeakSet[Exchanging] = WeakSet()
        self._stop = look_at_backwards(self._refuse)

    def close(self) -> None:
        """Let backwards be."""
        self._stop()

    def _refuse(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Refuse to compute gradients that would stay ``None``, or lack what goes through an exchange.

        Raises:
            ModelError: says what to do instead.
        """
        named = {id(tensor) for tensor in inputs if isinstance(tensor, torch.Tensor)}
        models = [each for each in self.models if not named.isdisjoint(map(id, each.model.parameters()))]
        if any(each.exchanges(nodes_of(outputs)) for each in models):
            raise ModelError(
                f"rank {self._world.placement.rank}: a backward through a divided model names parameters, as "
                "backward(inputs=…) or torch.autograd.grad(loss, parameters), and would give them no "
                "gradients, since these come from an exchange. Call loss.backward() and read parameter.grad; "
                "freeze parameters that need no gradient before the forward, by requires_grad_(False)."
            )
