"""A forward of a divided model is one of all ranks: where one rank runs it alone, that is an error, not a hang.

Forwards with gradients and those without come in turns. As a turn begins, each rank tells on the side channel which it
is, and how many forwards it has run in the one before, and waits for the others. Within a turn nothing is exchanged.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from distwrap._internals.torch import current_backward
from distwrap.errors import CollectiveError
from distwrap.group.world import World, current_world
from distwrap.supervision import stacks

PAUSE_SECONDS = 0.002
ASK_SECONDS = 0.5  # after which the others are asked where they are

_KINDS = {True: "with gradients", False: "without gradients"}


class Alignment:
    """The forwards of one model on this rank.

    Args:
        model: its name, for messages.
        key: of the model, alike on all ranks.
    """

    def __init__(self, model: str, key: str) -> None:
        self._model, self._key = model, f"forwards/{key}"
        self._world: World = current_world()
        self._with_gradients: bool | None = None
        self._turn = self._count = 0
        channel = self._world.channel
        if channel is not None:
            channel.work.serve(f"{self._key}/{self._world.placement.rank}", self._where)

    def forward(self) -> None:
        """Count a forward that begins now, and wait for the other ranks where it begins a turn.

        Raises:
            CollectiveError: another rank is not going to run it.
        """
        with_gradients = torch.is_grad_enabled()
        if with_gradients is not self._with_gradients:
            self._begin_turn(with_gradients)
        self._count += 1

    def _begin_turn(self, with_gradients: bool) -> None:
        before, self._count = self._count, 0
        self._with_gradients, self._turn = with_gradients, self._turn + 1
        channel, place = self._world.channel, self._world.placement
        if channel is None or current_backward() not in (None, -1):  # a recomputation is part of a backward
            return
        note = f"{self._key}/{self._turn}"
        channel.note(note, json.dumps([with_gradients, before]))
        for other in range(place.world_size):
            if other != place.rank:
                self._wait_for(other, note, before)

    def _wait_for(self, other: int, note: str, before: int) -> None:
        """Wait until another rank begins this turn too, while it may still come."""
        channel = self._world.channel
        assert channel is not None
        asked_at, seen = time.monotonic(), None
        while not (told := channel.noted(note, other)):
            time.sleep(PAUSE_SECONDS)
            if time.monotonic() - asked_at > ASK_SECONDS:
                answer = json.loads(channel.work.ask(f"{self._key}/{other}", other))
                turn, count, waits = answer
                if turn < self._turn and count > before:
                    self._refuse(other, f"begins forward {count} of the turn before, of which this one ran {before}")
                if turn < self._turn and waits and answer == seen:
                    self._refuse(other, waits)
                asked_at, seen = time.monotonic(), answer
        theirs, count = json.loads(told)
        if theirs is not self._with_gradients or count != before:
            self._refuse(other, f"has run {count} forwards before one {_KINDS[theirs]}, and this rank {before}")

    def _refuse(self, other: int, what: str) -> None:
        rank, kind = self._world.placement.rank, _KINDS[bool(self._with_gradients)]
        raise CollectiveError(
            f"rank {rank} runs a forward of {self._model} {kind}, and rank {other} {what}. A divided model's forward "
            f"is one of all ranks: run it on every rank the same number of times, as with distwrap.lockstep(loader), "
            f"or load what distwrap.save() has written into a plain model."
        )

    def _where(self, asked: Any, waited: float) -> bytes | None:
        """Return this rank's turn, its forwards in it, and where it waits for others; runs in the channel's thread."""
        assert self._world.channel is not None
        waits = ""
        if asked is None:
            waits = "has left the function"
        elif any(file.endswith("distributed_c10d.py") for file, *_ in stacks.of_thread()):
            waits = f"waits {self._world.channel.reporter.location()}"
        return json.dumps([self._turn, self._count, waits]).encode()
