"""Buffers of a model under DDP: each rank's own while it trains, rank 0's when training pauses.

DDP broadcasts rank 0's buffers before each forward, which makes of every evaluation a collective, and breaks two
forwards before one backward. Running statistics are not read in training: it is enough to have rank 0's in ``eval()``.
"""

import io
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn

from distwrap.checks import one_of
from distwrap.devices.kinds import SideStream
from distwrap.group.collectives import broadcast, reduce
from distwrap.group.world import current_world, say
from distwrap.model.checks.in_sync import fingerprint, statistics_of
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import Handle, WrappedModels
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import Channel

PATIENCE = 30.0  # seconds for rank 0 to come to where another rank evaluates
_BEHIND = 1.0  # seconds for rank 0's device to do what it was given; it may wait for the rank that asks


class Buffers:
    """Buffers of one wrapped model; a rank may ask for rank 0's at any time, and no other rank waits for that.

    Rank 0 may evaluate alone. Where all ranks do, rank 0 may be ahead when another asks, and still answers with what it
    had itself when its training paused; or behind, and answers once it has come as far.

    Args:
        model: the user's.
        rank: this one.
        channel: to the other ranks.
        name: of the model, alike on every rank that asks the same one.
        source: the rank whose buffers the others take over, which is called rank 0 here.
        holds: tells of which tensors this rank has the numbers; by default of all.

    Attributes:
        forwards: how many forwards there were in training; by this number ranks know which of them is ahead.
        agreed_at: that number when all ranks were given the same buffers for the last time, by a collective.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        channel: Channel,
        name: str,
        *,
        source: int = 0,
        holds: Callable[[torch.Tensor], bool] = lambda tensor: True,
    ) -> None:
        self._model, self._rank, self._channel, self._name = ref(model), rank, channel, f"buffers/{name}"
        self._source, self._holds = source, holds
        self._at_first = {key: fingerprint(value) for key, value in _others(model).items() if holds(value)}
        self._last = dict(model.named_buffers()) if rank == source else {}  # for who asks when rank 0's model is gone
        self._side = SideStream(next((buffer.device for buffer in model.buffers()), torch.device("cpu")))
        self._computed: Any = None  # the moment of the last forward in training
        self._kept: dict[str, torch.Tensor] | None = None
        self._kept_at = self.forwards = self._pauses = 0
        self.agreed_at = -1
        if rank == source:
            channel.work.serve(self._name, self._packed)

    def count_forward(self) -> None:
        """Count a forward in training."""
        self.forwards += 1
        if self._rank == self._source:
            self._computed = self._side.moment()

    def pause(self, *, waits: bool = True) -> None:
        """Take over rank 0's buffers, as training pauses on this rank.

        Args:
            waits: whether rank 0 comes where this rank is, so that its buffers of then can be waited for.
        """
        model = self._model()
        assert model is not None
        if self.agreed_at == self.forwards:
            return
        self._pauses += 1
        if self._rank == self._source:
            # On the CPU already: this device may be in a collective when another rank asks, and that waits for it.
            self._kept = {key: value.to("cpu", copy=True) for key, value in self._trained(model).items()}
            self._kept_at = self.forwards
            return
        with current_world().part(Activity).waiting("work", (self._source,)):
            data = self._channel.work.ask(self._name, self._source, [self.forwards, PATIENCE if waits else 0.0])
        at, pauses, answer = torch.load(io.BytesIO(data), weights_only=True)
        if 0 <= at < self.forwards or (at >= 0 and pauses == self._pauses):
            self.forwards = at  # ranks that have counted apart are together here, unless rank 0 is at a later pause
        own = dict(model.named_buffers())
        with torch.no_grad():
            for key, value in answer.items():
                own[key].copy_(value)

    def _packed(self, asked: tuple[int, float] | None = None, waited: float = 0.0) -> bytes | None:
        """Return rank 0's buffers as bytes; runs in its channel's thread, when another rank asks.

        Args:
            asked: how many forwards that rank has made, and its patience in seconds; ``None`` for rank 0's own.
            waited: seconds for which it has waited.

        Returns:
            Where training has paused on rank 0, its number of forwards then, and else -1; how often training has paused
            there; and the buffers by name. ``None`` while that rank is ahead.
        """
        model, values, at = self._model(), self._kept, self._kept_at
        forwards, patience = asked or (self.forwards, 0.0)
        if values is None or at < forwards:
            at = self.forwards
            if model is not None and model.training:
                if at < forwards and waited < patience:
                    return None
                if at < forwards and patience:
                    say(
                        f"eval() of {type(model).__name__} on another rank, after {forwards} forwards in "
                        f"training, takes over the buffers that rank 0 has after {at}, since rank 0 got no "
                        f"further within {patience:g} s."
                    )
                at = -1
            if asked is not None and not self._side.reached(self._computed):
                if waited < _BEHIND:
                    return None
                say(
                    f"eval() of {type(model).__name__} on another rank takes over buffers that rank 0's device "
                    f"is still computing, since its last forward did not end within {_BEHIND:g} s."
                )
                at = -1
            with self._side.current():
                values = self._last if model is None else self._trained(model)
                values = {key: value.detach().cpu() for key, value in values.items()}
        file = io.BytesIO()
        torch.save((at, self._pauses, values), file)
        return file.getvalue()

    def _trained(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers that training changes: running statistics, and others once they differ."""
        others = {key: value for key, value in _others(model).items() if self._holds(value)}
        changed = {key: value for key, value in others.items() if fingerprint(value) != self._at_first.get(key)}
        return {**{key: value for key, value in statistics_of(model).items() if self._holds(value)}, **changed}


def sync_buffers(model: nn.Module, how: str = "rank0") -> None:
    """Give every rank the same buffers, such as BatchNorm's running statistics; a collective.

    ``eval()`` of a wrapped model does so by itself, with rank 0's buffers, if the model was trained since. In a mean
    all ranks have equal weight.

    Args:
        model: a model, wrapped or not.
        how: ``"rank0"`` for rank 0's buffers; ``"mean"`` for the mean of floating-point buffers, and rank 0's for all
            others.

    Raises:
        OptionError: `how` is another word.

    Example:
        >>> sync_buffers(nn.BatchNorm1d(3), "mean")
    """
    one_of("way to synchronise buffers", ("rank0", "mean"))("how", how)
    net = unwrap_model(model)
    with torch.no_grad():
        own = [each.sync_buffers for each in _handles_of(net) if each.sync_buffers is not None]
        for sync in own:  # of a model of which no rank has all
            sync(how)
        if not own:
            for value in (buffer.detach() for buffer in net.buffers()):
                averaged = how == "mean" and value.is_floating_point()
                value.copy_(reduce(value, "mean") if averaged else broadcast(value))
    for synced in _buffers_of(net):
        synced.agreed_at = synced.forwards


def let_buffers_differ(model: nn.Module) -> None:
    """Take note that each rank has its own buffers again, after `sync_buffers`."""
    for synced in _buffers_of(unwrap_model(model)):
        synced.agreed_at = -1


def _buffers_of(net: nn.Module) -> list[Buffers]:
    return [each.buffers for each in _handles_of(net) if each.buffers is not None]


def _handles_of(net: nn.Module) -> list[Handle]:
    handles = current_world().part(WrappedModels).handles
    return [handle for model, handle in handles.items() if unwrap_model(model) is net]


def _others(model: nn.Module) -> dict[str, torch.Tensor]:
    statistics = statistics_of(model)
    return {key: value for key, value in model.named_buffers() if key not in statistics}
