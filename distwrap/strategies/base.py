"""The base class of strategies, with the defaults for models that every rank has whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distwrap import protocols
from distwrap.group.collectives import broadcast
from distwrap.model.checks.in_sync import tensors_of
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.protocols import ComparedTensor, Wrapping as Wrapping


class Strategy(protocols.Strategy):
    __doc__ = protocols.Strategy.__doc__

    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        return () if self.shards else tensors_of(model)

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        plain = unwrap_model(thing) if isinstance(thing, nn.Module) else thing
        return plain.state_dict()

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        if isinstance(thing, nn.Module):
            thing = unwrap_model(thing)
            state = strip_module_prefix(state, target=thing)
        thing.load_state_dict(state)


def take_rank_zero_weights(model: nn.Module) -> None:
    """Copy rank 0's weights and buffers to every rank, one tensor at a time; every rank calls it."""
    for tensor in {id(value): value for value in (*model.parameters(), *model.buffers())}.values():
        tensor.data.copy_(broadcast(tensor.data))
