"""Meetings of all ranks before they put a state together: a rank that asks for it alone gets an error, not a hang."""

from __future__ import annotations

import json
import time
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distwrap.errors import CollectiveError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.world import RunPart, World
from distwrap.model.wrapped_models import WrappedModels
from distwrap.strategies.alignment import ASK_SECONDS, PAUSE_SECONDS
from distwrap.supervision import stacks

_IN_COLLECTIVE = ("distributed_c10d.py", "nn/parallel/distributed.py")


class StateMeetings(RunPart):
    """States of what is divided in one run, which all ranks put together; made on all ranks at one point."""

    def __init__(self, world: World) -> None:
        self._world, self._count, self._has_left = world, 0, False
        self._key = f"states {world.count('states')}"
        if world.channel is not None:
            world.channel.work.serve(f"{self._key}/{world.placement.rank}", self._where)

    def meet(self, thing: nn.Module | Optimizer) -> None:
        """Wait for all other ranks to ask for the state of something too.

        Raises:
            CollectiveError: another rank is not going to.
        """
        name = "a model" if isinstance(thing, nn.Module) else type(thing).__name__
        check_collectives_allowed(f"the collective for the state of {name}, which is divided,")
        channel, place = self._world.channel, self._world.placement
        if channel is None or place.world_size == 1:
            return
        self._count += 1
        channel.note(self._key, str(self._count))
        for other in range(place.world_size):
            why = "" if other == place.rank else self._why_not(other)
            if why:
                raise CollectiveError(
                    f"rank {place.rank} asks for the state of {name}, which is divided, and rank {other} {why}. All "
                    f"ranks put such a state together: call distwrap.save() on every rank; rank 0 writes."
                )

    def _why_not(self, other: int) -> str:
        """Wait until another rank asks for the state too; return why it does not, empty where it does."""
        channel = self._world.channel
        assert channel is not None
        asked_at, seen = time.monotonic(), None
        while int(channel.noted(self._key, other) or 0) < self._count:
            time.sleep(PAUSE_SECONDS)
            if time.monotonic() - asked_at > ASK_SECONDS:
                answer = json.loads(channel.work.ask(f"{self._key}/{other}", other, None))
                asked_at, (forwards, in_collective, why) = time.monotonic(), answer
                is_past = in_collective or forwards > self._forwards()
                if why.startswith("has") or (is_past and answer == seen):
                    return str(why)
                seen = answer
        return ""

    def _forwards(self) -> int:
        """Return how many forwards in training this rank has begun."""
        total = 0
        for model in self._world.part(WrappedModels):
            routing: Any = model.__dict__.get("_distwrap")
            buffers = getattr(
                getattr(routing, "inner", None), "buffers_of_rank_zero", getattr(routing, "buffers", None)
            )
            total += getattr(buffers, "forwards", 0)
        return total

    def _where(self, asked: object, waited: float) -> bytes:
        """Answer another rank; runs in the channel's thread."""
        if self._has_left:
            return json.dumps([0, False, "has left the function"]).encode()
        assert self._world.channel is not None
        *_, (file, _, _) = stacks.of_thread()
        where = f"is {self._world.channel.reporter.location()}"
        return json.dumps([self._forwards(), file.endswith(_IN_COLLECTIVE), where]).encode()

    def close(self) -> None:
        """Note that no state is asked for any more."""
        self._has_left = True
