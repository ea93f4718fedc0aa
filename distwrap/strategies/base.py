"""The base class of strategies, with the defaults for models that every rank has whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distwrap import protocols
from distwrap.group.collectives import broadcast
from distwrap.model.in_sync import tensors_of
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.protocols import Held, Wrapping as Wrapping


class Strategy(protocols.Strategy):
    __doc__ = protocols.Strategy.__doc__

    def held(self, model: nn.Module) -> Iterable[Held]:
        if (holders := self.holders(model)) is None:
            return () if self.shards else tensors_of(model)
        from distwrap.strategies import shards  # imports torch's DTensor

        return shards.held(unwrap_model(model), holders)

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        if (holders := self.holders(thing)) is None:
            return (unwrap_model(thing) if isinstance(thing, nn.Module) else thing).state_dict()
        from distwrap.strategies import shards

        return shards.full_state(thing, holders, everywhere=everywhere)

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        if (holders := self.holders(thing)) is not None:
            from distwrap.strategies import shards

            shards.load(thing, state, holders)
        elif isinstance(thing, nn.Module):
            net = unwrap_model(thing)
            net.load_state_dict(strip_module_prefix(state, target=net))
        else:
            thing.load_state_dict(state)

    def parts(self, thing: nn.Module | Optimizer) -> dict[str, Any] | None:
        if (holders := self.holders(thing)) is None:
            return None
        from distwrap.strategies import shards

        return shards.parts(thing, holders)

    def parts_to_load(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if (holders := self.holders(thing)) is None:
            return None
        from distwrap.strategies import shards

        return shards.needed(thing, state, holders)


def take_rank_zero_weights(model: nn.Module) -> None:
    """Copy rank 0's weights and buffers to every rank, one tensor at a time; every rank calls it."""
    for tensor in {id(value): value for value in (*model.parameters(), *model.buffers())}.values():
        tensor.data.copy_(broadcast(tensor.data))
