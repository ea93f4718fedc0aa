"""Check that all ranks run each forward of a divided model, so that a forward of one rank is an error and not a hang.

Forwards with and without gradients come in turns. Ranks meet on the side channel when a turn begins, and before each
forward without gradients, and compare which forward it is. Other forwards with gradients cost nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from distwrap._internals.torch_autograd import in_backward
from distwrap.errors import CollectiveError
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.in_sync import Held
from distwrap.model.watch import is_power_of_two
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity
from distwrap.wording import named_ranks

PAUSE_SECONDS = 0.0005
ASK_SECONDS = 0.5  # until a missing rank is asked where it is

_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")  # files of torch's
_KINDS = {True: "with gradients", False: "without gradients"}


class Counted(Protocol):
    """Counter of an operation of a model on this rank, in each of its turns."""

    turn: int
    count: int


class Alignments(RunPart):
    """Divided models of a run on this rank, which answers other ranks where its forwards are.

    Attributes:
        world: the world of the run.
        has_left: whether this rank is at the end of the run.
        meeting: the meeting at which this rank waits: the number of the model, the turn, and the forward in it.
    """

    def __init__(self, world: World) -> None:
        self.world, self.has_left = world, False
        self._models: WeakValueDictionary[int, Counted] = WeakValueDictionary()
        self._added = 0
        self.meeting: tuple[int, int, int] | None = None
        self._name = f"forwards {world.count('alignments')}"
        if world.channel is not None:
            world.channel.work.serve(f"{self._name}/{world.placement.rank}", self._where)

    def add(self, counted: Counted) -> str:
        """Add a counter of a model, and return the key of its notes, which is the same on all ranks."""
        self._models[self._added + 1] = counted  # first, since the channel's thread may read it
        self._added += 1
        return f"{self._name}/{self._added}"

    def ask(self, rank: int, key: str) -> tuple[list[int], str]:
        """Return the turn and forward of a model on another rank, and why it does not come; empty if it may come."""
        assert self.world.channel is not None
        position, why, meeting = json.loads(self.world.channel.work.ask(f"{self._name}/{rank}", rank, key))
        if meeting is not None:
            number, turn, count = meeting
            own = self._models.get(number)
            if own is not None and (own.turn, own.count) >= (turn, count):  # passed here, so that rank will come
                why = ""
        return position, why

    @contextmanager
    def waiting_at(self, key: str, counted: Counted) -> Iterator[None]:
        """Note the meeting at which this rank waits, so that ranks that have passed it do not take it for a hang."""
        self.meeting = int(key.rpartition("/")[2]), counted.turn, counted.count
        try:
            with self.world.part(Activity).waiting():
                yield
        finally:
            self.meeting = None

    def close(self) -> None:
        """Note that this rank runs no more forwards."""
        self.has_left = True

    def _where(self, key: str | None, waited: float) -> bytes:
        """Answer another rank; runs in the channel's thread."""
        number = int((key or "0").rpartition("/")[2])
        is_to_come = number > self._added  # read first, since another thread adds models
        model = self._models.get(number)
        if is_to_come and not self.has_left:
            return json.dumps([[0, 0], "", None]).encode()  # this rank is still in wrap_model()
        if model is None or self.has_left:
            return json.dumps([[0, 0], "has left the function, or no longer has the model", None]).encode()
        assert self.world.channel is not None
        meeting = self.meeting if self.meeting is not None and self.meeting[0] != number else None
        in_collective = any(file.endswith(_COLLECTIVES) for file, *_ in stacks.of_thread())
        why = f"is {self.world.channel.reporter.location()}" if in_collective or meeting else ""
        return json.dumps([[model.turn, model.count], why, meeting]).encode()


class Alignment:
    """Forwards of one model on this rank.

    Args:
        model: the name of the model, for messages.
        ranks: the ranks that run its forwards together; by default all.

    Attributes:
        turn: the number of turns that have begun.
        count: the number of forwards in this turn, with the current one.
    """

    def __init__(self, model: str, ranks: Sequence[int] | None = None) -> None:
        self._model, self._all = model, current_world().part(Alignments)
        self._ranks = range(self._all.world.placement.world_size) if ranks is None else ranks
        self._part = f"{self._ranks[0]}: {named_ranks(self._ranks)}"
        self._with_gradients: bool | None = None
        self.turn = self.count = self._before = self._forwards = 0
        self._key = self._all.add(self)

    def forward(self) -> None:
        """Count a forward that begins, and wait for the other ranks if they have to meet.

        Raises:
            CollectiveError: another rank will not run it.
        """
        with_gradients = torch.is_grad_enabled()
        begins = with_gradients is not self._with_gradients
        if begins:
            if in_backward():  # a recomputation is part of a backward of all ranks
                return
            self._with_gradients, self._before = with_gradients, self.count
            self.turn, self.count = self.turn + 1, 0
        self.count += 1
        self._forwards += 1
        if begins or not with_gradients:
            self._meet()

    def held(self) -> Held:
        """Return the number of forwards, to compare ranks of which one may step more often than the others."""
        return Held("the number of forwards until then", self._part, self._forwards)

    def interrupt(self) -> None:
        """Make the ranks meet before the next forward, after an exception in a forward or its backward."""
        self._with_gradients = None

    def _meet(self) -> None:
        # Meetings between nodes load the store, so there are few of them.
        world = self._all.world
        if world.channel is None or not (world.placement.nnodes == 1 or is_power_of_two(self.count)):
            return
        with self._all.waiting_at(self._key, self):
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        channel, place = self._all.world.channel, self._all.world.placement
        assert channel is not None
        mine = [self.turn, self.count, self._with_gradients, self._before]
        channel.note(self._key, json.dumps(mine))
        first = self._ranks[0]
        if place.rank != first:
            self._wait_for(first)
            self._wait_for_verdict(first)
            return
        verdict = ""
        try:
            for other in self._ranks[1:]:
                self._wait_for(other)
        except CollectiveError as error:
            verdict = str(error)
            raise
        finally:
            channel.note(f"{self._key}/verdict", json.dumps([self.turn, self.count, verdict]))

    def _wait_for_verdict(self, first: int) -> None:
        """Wait until the first rank has seen all others reach this forward."""
        channel = self._all.world.channel
        assert channel is not None
        asked_at = time.monotonic()
        while True:
            turn, count, verdict = json.loads(channel.noted(f"{self._key}/verdict", first) or '[0, 0, ""]')
            if (turn, count) >= (self.turn, self.count):
                if verdict:
                    raise CollectiveError(verdict)
                return
            time.sleep(PAUSE_SECONDS)
            if time.monotonic() - asked_at > ASK_SECONDS:
                asked_at, (_, why) = time.monotonic(), self._all.ask(first, self._key)
                if why.startswith("has"):
                    self._refuse(first, why)

    def _wait_for(self, other: int) -> None:
        """Wait until another rank reaches this forward too, as long as it may."""
        channel = self._all.world.channel
        assert channel is not None
        asked_at, seen = time.monotonic(), dict[int, tuple[list[int], str]]()
        while True:
            turn, count, kind, before = json.loads(channel.noted(self._key, other) or "[0, 0, null, 0]")
            if (turn, count) >= (self.turn, self.count):
                break
            time.sleep(PAUSE_SECONDS)
            if time.monotonic() - asked_at > ASK_SECONDS:
                asked_at, answer = time.monotonic(), self._all.ask(other, self._key)
                (its_turn, its_count), why = answer
                if its_turn == self.turn - 1 and its_count > self._before:
                    kind = _KINDS[not self._with_gradients]
                    self._refuse(other, f"begins forward {its_count} {kind}, of which this rank ran {self._before}")
                before_then, seen = seen, self._absent(other, answer) if why else {}
                stands = seen == before_then and all(reason for _, reason in seen.values())
                if why and (stands or why.startswith("has")) and [its_turn, its_count] < [self.turn, self.count]:
                    self._refuse(other, why)
        if turn == self.turn and (kind is not self._with_gradients or before != self._before):
            self._refuse(other, f"has run {before} forwards before one {_KINDS[kind]}, and this rank {self._before}")
        if turn > self.turn and before < self.count:  # else it was here before, and does not wait in a forward
            self._refuse(other, f"has gone on to one {_KINDS[kind]} after {before}")

    def _absent(self, other: int, answer: tuple[list[int], str]) -> dict[int, tuple[list[int], str]]:
        """Return the answers of all missing ranks, since one that computes may be what another waits for."""
        place = self._all.world.placement
        answers = {other: answer}
        for rank in range(place.world_size):
            if rank not in (place.rank, other):
                answers[rank] = self._all.ask(rank, self._key)
        return {rank: answer for rank, answer in answers.items() if answer[0] < [self.turn, self.count]}

    def _refuse(self, other: int, what: str) -> None:
        rank, kind = self._all.world.placement.rank, _KINDS[bool(self._with_gradients)]
        raise CollectiveError(
            f"rank {rank} runs forward {self.count} of {self._model} {kind}, and rank {other} {what}. All "
            "ranks take part in each forward of a divided model: run it equally often on every rank, by "
            "distwrap.lockstep(loader) and without a condition such as 'if rank() == 0', or load what "
            "distwrap.save() has written into a plain model."
        )
