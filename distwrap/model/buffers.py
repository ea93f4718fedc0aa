"""Buffers of a model under DDP: each rank's own while it trains, rank 0's when training pauses.

DDP broadcasts rank 0's buffers before each forward, which makes of every evaluation a collective, and breaks two
forwards before one backward. Running statistics are not read in training: it is enough to have rank 0's in ``eval()``.
"""

import io
from weakref import ref

import torch
from torch import nn

from distwrap._internals.torch import norm_classes
from distwrap.checks import one_of
from distwrap.group.collectives import broadcast, reduce
from distwrap.model.fingerprints import fingerprint
from distwrap.model.transparent import unwrap_model
from distwrap.supervision.channel import Channel


class Buffers:
    """Buffers of one wrapped model; a rank may ask for rank 0's at any time, and no other rank waits for that.

    Rank 0 may evaluate alone. Where all ranks do, rank 0 may be a step ahead when another asks, and still answers with
    what it had itself when its training paused.

    Args:
        model: the user's.
        rank: this one.
        channel: to the other ranks.
        name: of the model, alike on every rank.

    Attributes:
        averages: how many backwards have averaged gradients.
    """

    def __init__(self, model: nn.Module, rank: int, channel: Channel, name: str) -> None:
        self._model, self._rank, self._channel, self._name = ref(model), rank, channel, f"buffers/{name}"
        self._at_first = {key: fingerprint(value) for key, value in _others(model).items()}
        self._last = dict(model.named_buffers()) if rank == 0 else {}  # for who asks when rank 0's model is gone
        self._kept: dict[str, torch.Tensor] | None = None
        self._kept_at = self.averages = 0
        if rank == 0:
            channel.work.serve(self._name, self._packed)

    def pause(self) -> None:
        """Take over rank 0's buffers, as training pauses on this rank."""
        model = self._model()
        assert model is not None
        if self._rank == 0:
            self._kept = {key: value.clone() for key, value in self._trained(model).items()}
            self._kept_at = self.averages
            return
        answer = torch.load(io.BytesIO(self._channel.work.ask(self._name, 0)), weights_only=True)
        own = dict(model.named_buffers())
        with torch.no_grad():
            for key, value in answer.items():
                own[key].copy_(value)

    def _packed(self) -> bytes:
        """Return rank 0's buffers as bytes; runs in its channel's thread, when another rank asks."""
        model, values = self._model(), self._kept
        if values is None or self.averages - self._kept_at > 1:
            values = self._last if model is None else self._trained(model)
        file = io.BytesIO()
        torch.save({key: value.detach().cpu() for key, value in values.items()}, file)
        return file.getvalue()

    def _trained(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers that training changes: running statistics, and others once they differ."""
        others = {key: value for key, value in _others(model).items() if fingerprint(value) != self._at_first.get(key)}
        return {**statistics_of(model), **others}


def sync_buffers(model: nn.Module, how: str = "rank0") -> None:
    """Give every rank the same buffers, as BatchNorm's running statistics; a collective.

    ``eval()`` of a wrapped model does it by itself, from rank 0. The mean is over ranks of equal weight.

    Args:
        model: wrapped or not.
        how: ``"rank0"``: rank 0's; ``"mean"``: floating-point ones averaged, the others rank 0's.

    Raises:
        OptionError: another word.

    Example:
        >>> sync_buffers(nn.BatchNorm1d(3), "mean")
    """
    one_of("way to synchronise buffers", ("rank0", "mean"))("how", how)
    values = {key: value.detach() for key, value in unwrap_model(model).named_buffers()}
    with torch.no_grad():
        for value in values.values():
            averaged = how == "mean" and value.is_floating_point()
            value.copy_(reduce(value, "mean") if averaged else broadcast(value))


def statistics_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are a norm's running statistics, and differ between ranks while training."""
    return {
        f"{prefix}.{key}" if prefix else key: value
        for prefix, part in model.named_modules()
        if isinstance(part, norm_classes())
        for key, value in part.named_buffers(recurse=False)
    }


def _others(model: nn.Module) -> dict[str, torch.Tensor]:
    statistics = statistics_of(model)
    return {key: value for key, value in model.named_buffers() if key not in statistics}
