"""The base class of strategies, with the defaults for models that every rank has whole."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from distwrap import protocols
from distwrap.errors import OptionError
from distwrap.former_names import REMOVED
from distwrap.group.collectives import broadcast
from distwrap.group.world import current_world
from distwrap.model.checks.in_sync import tensors_of
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.options import Options
from distwrap.protocols import ComparedTensor, Wrapping as Wrapping
from distwrap.wording import unknown_name

if TYPE_CHECKING:
    from typing_extensions import Self

    from distwrap.strategies.shards import Divided


class _Options:
    """Check of the options of a class; a base of its own, so that its signature is that of ``__init__``."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Make an object, if it has these options.

        Raises:
            OptionError: it has none of a name; the message has the nearest name, or what came in its place.
        """
        known = inspect.signature(cls.__init__).parameters
        for name in [name for name in options if name not in known]:
            if name in REMOVED["option"]:
                raise OptionError(f"{cls.__name__}({name}=…): {REMOVED['option'][name]}")
            if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
                raise OptionError(unknown_name(f"option of {cls.__name__}", name, [*known][1:]))
        return super().__new__(cls)


class Strategy(protocols.Strategy, _Options):
    __doc__ = protocols.Strategy.__doc__

    def __init__(self) -> None:
        """Make a strategy without options."""

    def check(self, run: Options) -> None:
        if run.comm is not None and self.exchanges:
            kind = type(self).__name__
            raise OptionError(
                f"comm= does not go with {kind}: {self.exchanges}. Leave comm out, or use strategy='ddp'."
            )

    def refuse_options(self, wrapping: Wrapping) -> None:
        """Refuse options of `wrap_model`, for a strategy that has none there.

        Raises:
            OptionError: there is one.
        """
        for name in wrapping.options:
            kind = type(self).__name__
            raise OptionError(f"wrap_model({name}=…): {kind} takes no options there: give its own to {kind}(…).")

    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        if (divided := self._divided(model)) is not None:
            return divided.held()
        return () if self.shards else tensors_of(model)

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        if (divided := self._divided(thing)) is not None:
            return divided.state(everywhere=everywhere)
        return (unwrap_model(thing) if isinstance(thing, nn.Module) else thing).state_dict()

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        if (divided := self._divided(thing)) is not None:
            divided.load(state)
        elif isinstance(thing, nn.Module):
            net = unwrap_model(thing)
            net.load_state_dict(strip_module_prefix(state, target=net))
        else:
            thing.load_state_dict(state)

    def parts(self, thing: nn.Module | Optimizer) -> dict[str, Any] | None:
        return None if (divided := self._divided(thing)) is None else divided.parts()

    def parts_to_load(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        return None if (divided := self._divided(thing)) is None else divided.needed(state)

    def _divided(self, thing: nn.Module | Optimizer) -> Divided | None:
        if current_world().placement.world_size == 1 or (holders := self.holders(thing)) is None:
            return None
        from distwrap.strategies.shards import Divided  # imports torch's DTensor

        return Divided(thing, holders)


def take_rank_zero_weights(model: nn.Module) -> None:
    """Copy rank 0's weights and buffers to every rank, one tensor at a time; every rank calls it."""
    for tensor in {id(value): value for value in (*model.parameters(), *model.buffers())}.values():
        tensor.data.copy_(broadcast(tensor.data))
