"""Average the weights of replicas that train on their own, for evaluation, checkpoints and the end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from distwrap.comm.exchange import Exchange
from distwrap.comm.link import Traffic
from distwrap.comm.weights import WeightExchange
from distwrap.errors import ModelError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.world import current_world
from distwrap.model.buffers import let_buffers_differ, sync_buffers
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, handle_of
from distwrap.supervision.activity import Activity


class Consolidated(AbstractContextManager[None]):
    """Mean of all ranks' weights in a model; leaving the ``with`` restores each rank's own weights.

    Args:
        exchange: the model's exchange; ``None`` if all ranks hold the same weights.
    """

    def __init__(self, exchange: WeightExchange[Any] | None) -> None:
        self._exchange = None
        if exchange is not None and exchange.model is not None:
            self._exchange, self._own = exchange, exchange.consolidate()
            self._buffers = [(buffer, buffer.clone()) for buffer in exchange.model.buffers()]
            sync_buffers(exchange.model, "mean")
            exchange.brought_together()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with torch.no_grad():
                for buffer, own in self._buffers:
                    buffer.copy_(own)
            if exchange.model is not None:
                let_buffers_differ(exchange.model)
            exchange.restore(self._own)


def consolidate(model: nn.Module) -> Consolidated:
    """Give every rank the mean of all ranks' weights and buffers, to evaluate, save or return them; a collective.

    It acts under algorithms of ``comm=`` whose ranks hold different weights, as ``local_sgd``, ``diloco``, ``async``
    and ``decentralized``; with all others, and in a single process, it does nothing. After a plain call the ranks keep
    the mean. Within a ``with`` they have the mean, and afterwards each rank continues with its own weights. Under
    ``strategy="hivemind"`` all ranks take the newest weights that the peers have averaged, and keep them.

    Args:
        model: the wrapped model.

    Raises:
        CollectiveInRankZeroError: only some ranks call this.

    Example:
        >>> model = wrap_model(nn.Linear(1, 1))
        >>> with consolidate(model):
        ...     weights = model.state_dict()
    """
    check_collectives_allowed("consolidate()")
    current_world().part(Activity).record("consolidate")
    exchange: Any = _exchange_of(model)
    strategy = bound_strategy(model)
    if strategy is not None:
        strategy.consolidate(model)
    return Consolidated(None if exchange is None or exchange.algorithm.same_weights else exchange)


def pause(model: nn.Module) -> AbstractContextManager[None]:
    """Stop the averaging of ``comm="async"`` within a ``with``; all ranks must enter and leave it.

    Use it for work that takes long between two steps, as an evaluation, because the averaging of the other ranks would
    wait for this rank's next step. With other algorithms it does nothing.

    Args:
        model: the wrapped model.

    Example:
        >>> with pause(wrap_model(nn.Linear(1, 1))):
        ...     pass
    """
    check_collectives_allowed("pause()")
    exchange = _exchange_of(model)
    return nullcontext() if exchange is None else exchange.paused()


def traffic(model: nn.Module) -> Traffic:
    """Return what this rank has sent for a model so far; zeros if the model was wrapped without ``comm=``.

    Args:
        model: the wrapped model.

    Example:
        >>> traffic(wrap_model(nn.Linear(1, 1))).sent
        0
    """
    exchange = _exchange_of(model)
    return exchange.traffic if exchange is not None else Traffic()


def _exchange_of(model: nn.Module) -> Exchange[Any] | None:
    """Return the exchange of a wrapped model, also if the model was compiled afterwards."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            "consolidate(), pause() and traffic() take the model that wrap_model() returned, not a "
            f"{type(model).__name__}."
        )
    net = unwrap_model(model)
    for wrapped in current_world().part(WrappedModels):
        if unwrap_model(wrapped) is net and (handle := handle_of(wrapped)) is not None and handle.exchange:
            return handle.exchange  # type: ignore[no-any-return]
    return None
