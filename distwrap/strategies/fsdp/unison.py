"""Check that all ranks of a divided model make the same exchanges, so that a mismatch is an error.

All ranks predict the next exchange by one rule from those before. While predictions hold, nothing is compared. A rank
with another exchange publishes it, and checks before it starts that its neighbours make the same one.
"""

from __future__ import annotations

import json
import time
from typing import NoReturn

import torch

from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.strategies.alignment import ASK_SECONDS, PAUSE_SECONDS, Alignments

Exchange = tuple[int, int]  # the unit; a bit mask of averaged gradients, or -1: weights are gathered

_END: Exchange = (-1, -1)  # the end of a forward and its backward
STUCK_SECONDS = 4.0  # for which a stuck rank has waited in one collective
_KNOWN = 10_000  # most sequences of exchanges to remember


class Unison:
    """Exchanges of one model on this rank.

    Args:
        model: the name of the model, for messages.
        units: the names of the parameters of each unit.
        does: the verb for an exchange that averages no gradients.

    Attributes:
        turn: the number of forwards that have begun.
        count: the number of exchanges begun in the current forward and its backward.
    """

    def __init__(self, model: str, units: list[list[str]], does: str = "gathers") -> None:
        self._model, self._units, self._does = model, units, does
        self._all = current_world().part(Alignments)
        self.turn = self.count = 0  # before the channel's thread can read it
        self._key = self._all.add(self)
        self._noted: list[list[object]] = []
        self.forget()

    def forget(self) -> None:
        """Forget all predictions after an exception, which may have come at another place on each rank."""
        self._after_all: dict[int, Exchange] = {}
        self._after_last: dict[Exchange, Exchange] = {}
        self._context = self._sequence = 0
        self._last, self._is_new = _END, True

    def forward(self, averages: bool) -> None:
        """Note that a forward begins, and whether its backward averages gradients.

        Raises:
            ModelError: another rank has still an exchange of the previous forward to make.
        """
        if not self._is_new:
            self.exchange(*_END)
        self.turn, self.count, self._is_new = self.turn + 1, 0, False
        self._context, self._sequence = hash((self._sequence, torch.is_grad_enabled(), averages)), 0

    def exchange(self, unit: int, gradients: int) -> None:
        """Note that an exchange is about to begin.

        Raises:
            ModelError: another rank makes a different one.
        """
        now = unit, gradients
        foreseen = self._after_all.get(self._context) or self._after_last.get(self._last)
        if now != foreseen:
            self._compare(now, foreseen)
        if len(self._after_all) > _KNOWN:
            self._after_all.clear()
        self._after_all[self._context] = self._after_last[self._last] = now
        self._context, self._sequence, self._last = hash((self._context, now)), hash((self._sequence, now)), now
        self.count += 1

    def _compare(self, now: Exchange, foreseen: Exchange | None) -> None:
        """Wait until the neighbouring ranks reach this place, and check that they make this exchange."""
        channel, place = self._all.world.channel, self._all.world.placement
        if channel is None:
            return
        # The neighbours wait for this rank too, so they are at most one exchange ahead.
        self._noted = [*self._noted[-1:], [[self.turn, self.count], now, self._words(now)]]
        channel.note(self._key, json.dumps(self._noted))
        with self._all.waiting_at(self._key, self):
            for other in {(place.rank + step) % place.world_size for step in (1, -1)}:
                its, words = self._of(other, now) or (foreseen, self._words(foreseen))
                if its is None or tuple(its) != now:
                    self._refuse(now, other, words)

    def _of(self, other: int, now: Exchange) -> tuple[Exchange, str] | None:
        """Return the exchange that another rank published for this place; ``None`` if it made the predicted one."""
        channel, here = self._all.world.channel, [self.turn, self.count]
        assert channel is not None
        asked_at, is_past, there = time.monotonic(), False, ("", time.monotonic())
        while True:
            noted = json.loads(channel.noted(self._key, other) or "[]")
            for at, its, words in noted:
                if at == here:
                    return its, words
            if is_past or any(at > here for at, *_ in noted):
                return None
            time.sleep(PAUSE_SECONDS)
            if time.monotonic() - asked_at > ASK_SECONDS:
                asked_at, (at, why) = time.monotonic(), self._all.ask(other, self._key)
                is_past = at > here
                if why != there[0]:
                    there = why, asked_at
                is_stuck = bool(why) and not is_past and asked_at - there[1] > STUCK_SECONDS
                if why.startswith("has left") or is_stuck:
                    self._refuse(now, other, why)

    def _words(self, exchange: Exchange | None) -> str:
        if exchange is None or exchange == _END:
            return "has come to its end" if exchange else "does something else"
        names, gradients = self._units[exchange[0]], exchange[1]
        without = [name for place, name in enumerate(names) if not gradients >> place & 1]
        if gradients == -1:
            return f"{self._does} {_few(names)}"
        return f"has no gradients of {_few(without)}" if without else f"has gradients of all of {_few(names)}"

    def _refuse(self, now: Exchange, other: int, its: str) -> NoReturn:
        rank, mine = self._all.world.placement.rank, self._words(now)
        way_out = (
            "Give zeros to parameters that have no gradient on some ranks, by "
            "model.set_reduce_scatter_unused_params(True)"
            if now[1] > 0
            else "Make a module that runs on some ranks only, as an expert, a part of a larger unit, as by "
            "wrap=['Block']"
        )
        if its.startswith("has left"):
            way_out = "Look for a return, a break or a loop that differs between ranks"
        raise ModelError(
            f"in forward {self.turn} of {self._model} or its backward, rank {rank} {mine}, and rank {other} "
            f"{its}. Their numbers would be mixed up: all ranks must use the same units of a divided model in "
            f"the same order, whatever their data. {way_out}."
        )


def _few(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
