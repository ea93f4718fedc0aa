"""The exchanges of one run: told of optimizer steps, settled and closed at its end."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distwrap.group.world import RunPart, World, say
from distwrap.precision import LossScaling

if TYPE_CHECKING:
    from distwrap.comm.exchange import Exchange
    from distwrap.comm.weights import WeightExchange


class Exchanges(RunPart):
    """Exchanges of the models of one run, in the order in which the models were wrapped.

    Attributes:
        of_weights: those of models whose ranks hold different weights; they act around optimizer steps.
    """

    def __init__(self, world: World) -> None:
        self._exchanges: list[Exchange[Any]] = []
        self.of_weights: list[WeightExchange[Any]] = []
        self._handles: list[RemovableHandle] = []
        self._scaling = world.part(LossScaling)

    def add(self, exchange: Exchange[Any]) -> None:
        """Note a new exchange."""
        self._exchanges.append(exchange)

    def watch_steps(self, exchange: WeightExchange[Any]) -> None:
        """Tell an exchange of all optimizers' steps.

        torch's hooks stay until the end of the run: one that goes while torch runs them, as a model may, breaks them.
        """
        self.of_weights.append(exchange)
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]
            self._scaling.on_skipped.append(self._skipped_step)

    def remove(self, exchange: Exchange[Any]) -> None:
        """Forget an exchange that is closed."""
        for exchanges in (self._exchanges, self.of_weights):
            if exchange in exchanges:
                exchanges.remove(exchange)  # type: ignore[arg-type]

    def close_unused(self) -> None:
        """Close the exchanges of models that nobody holds any more.

        This waits for the next model: a garbage collection, which finds such a model, comes in any thread and anywhere,
        also in the middle of making a group.
        """
        for exchange in list(self._exchanges):
            if exchange.model is None and not exchange.runs:
                exchange.close()

    def settle(self) -> None:
        for exchange in list(self.of_weights):
            exchange.settle()

    def close(self) -> None:
        with ExitStack() as stack:
            for handle in self._handles:
                stack.callback(handle.remove)
            for exchange in self._exchanges:
                stack.callback(exchange.close)

    def state(self) -> list[dict[str, Any]]:
        """Return what exchanges of weights hold beside weights and optimizers, one dict for each model."""
        return [{"algorithm": _name(exchange), **exchange.state_dict()} for exchange in self._held()]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Go on from the states of a checkpoint. Under another algorithm they are left out, and a line says so."""
        exchanges = self._held()
        saved, present = [state["algorithm"] for state in states], [_name(exchange) for exchange in exchanges]
        if saved == present:
            for exchange, state in zip(exchanges, states, strict=True):
                exchange.load_state_dict(state)
        elif saved:
            goes_on = ", ".join(present) or "another comm="
            say(
                f"this run was saved under {', '.join(saved)} and goes on under {goes_on}: the "
                f"count of steps and the outer momentum begin anew. To keep them, wrap the same models with the same "
                f"comm= before load()."
            )

    def _held(self) -> list[WeightExchange[Any]]:
        if len(self.of_weights) > 1:
            gc.collect()  # a model that nobody holds may still be there, on one rank and not on another
        return [exchange for exchange in self.of_weights if exchange.model is not None]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for exchange in list(self.of_weights):
            exchange.before(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for exchange in list(self.of_weights):
            exchange.after(optimizer)

    def _skipped_step(self, optimizer: Optimizer) -> None:
        """Count a step that fp16 has skipped on this rank: the others may have taken it."""
        self._before_step(optimizer, (), {})
        self._after_step(optimizer, (), {})


def _name(exchange: WeightExchange[Any]) -> str:
    return type(exchange.algorithm).__name__
