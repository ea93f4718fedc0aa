"""Refuse backwards with ``inputs=`` through a divided model, since an exchange does not know of the inputs."""

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
    """Model whose parameters get their gradients from an exchange, and not from autograd."""

    @property
    def model(self) -> nn.Module:
        """The user's model."""

    def exchanges(self, nodes: Iterable[Any]) -> bool:
        """Return whether autograd passes gradients to the exchange at any of these nodes of a graph."""


class NamedInputs(RunPart):
    """Check of each backward of a run that has ``inputs=``.

    Attributes:
        models: the models to check, as long as something refers to them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.models: WeakSet[Exchanging] = WeakSet()
        self._stop = look_at_backwards(self._refuse)

    def close(self) -> None:
        """Stop checking backwards."""
        self._stop()

    def _refuse(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Refuse to compute gradients that would stay ``None``, or lack the part from an exchange.

        Raises:
            ModelError: they would; the message says what to do instead.
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
