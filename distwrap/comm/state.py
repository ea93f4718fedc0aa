"""What exchanges of weights hold beside weights and optimizers, for `run_state`."""

from __future__ import annotations

import gc
from typing import Any

from distwrap.comm.exchange import Exchanges
from distwrap.group.world import World, say


def state_of_exchanges(world: World) -> list[dict[str, Any]]:
    """Return it, a dict for each model, in the order in which they were wrapped."""
    return [{"algorithm": _name(exchange), **exchange.state_dict()} for exchange in _exchanges(world)]


def restore_exchanges(world: World, states: list[dict[str, Any]]) -> None:
    """Go on with it; under another algorithm it is left out, and said so."""
    exchanges = _exchanges(world)
    saved, present = [state["algorithm"] for state in states], [_name(exchange) for exchange in exchanges]
    if saved == present:
        for exchange, state in zip(exchanges, states, strict=True):
            exchange.load_state_dict(state)
    elif saved:
        say(
            f"this run was saved under {', '.join(saved)} and goes on under {', '.join(present) or 'another comm='}: "
            f"the count of steps and the outer momentum begin anew. To keep them, wrap the same models with the same "
            f"comm= before load()."
        )


def _exchanges(world: World) -> list[Any]:
    exchanges = world.part(Exchanges).of_weights
    if len(exchanges) > 1:
        gc.collect()  # a model that nobody holds may still be there, on one rank and not on another
    return [exchange for exchange in exchanges if exchange.model is not None]


def _name(exchange: Any) -> str:
    return type(exchange.algorithm).__name__
