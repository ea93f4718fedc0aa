"""Check that all ranks of a divided model go through the same events in one order, so that a mismatch is an error.

Events are forwards, exchanges of units, and reads of numbers. All ranks foresee the next event by one rule from those
before. While this holds, nothing is compared. A rank with another event, or with one that ranks often make alone, as a
forward without gradients, publishes it, and waits until its neighbours in the ring of ranks have published theirs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distwrap._internals.torch import collectives_begun
from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_tree import tensors_in, tree_leaves
from distwrap.errors import CollectiveError, ModelError
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.checks.in_sync import ComparedTensor, fingerprints, first_difference, is_power_of_two
from distwrap.seeding import mix
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity
from distwrap.wording import first_names, named_ranks

PAUSE_SECONDS = 0.0005
ASK_SECONDS = 0.5  # between two questions to a missing rank about where it is
STUCK_SECONDS = 1.5  # for which all other ranks have stood where they wait

Event = tuple[int, int, int]  # the number of the model; a unit or one of the next; the detail
FORWARD = -1  # its detail: whether it has gradients, and, as a second bit, whether they are averaged
READ = -2  # a number or the weights of divided tensors
GATHER = -1  # the detail of a unit whose weights are gathered; else a bit mask of its gradients that are averaged

_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")  # files of torch's
_KNOWN = 10_000  # most sequences of events to remember
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BATCH_HINT = "Take the batches from distwrap.shard_loader(loader), which gives all these ranks the same share."


class Seen(Enum):
    """Another rank, as a rank sees it that waits at an event."""

    SAME = "has published the same event for this place"
    OTHER = "has published another event for this place"
    PAST = "has passed this place, and published nothing, so that it made the event that was foreseen"
    COMING = "is before this place, and some rank is not in a wait"
    STUCK = "is before this place, and all ranks have stood in waits for a while"
    LEFT = "is before this place, and has left the function"


# What a rank does then: go on (True), refuse (False), or look again.
DECISIONS: dict[Seen, bool | None] = {
    Seen.SAME: True,
    Seen.OTHER: False,
    Seen.PAST: False,  # as this rank waits for what was not foreseen, or for what is always published
    Seen.COMING: None,
    Seen.STUCK: False,
    Seen.LEFT: False,
}


class Foresight:
    """Rule by which every rank foresees the next event from those before."""

    def __init__(self) -> None:
        self._after_all, self._after_last = dict[int, Event](), dict[Event | None, Event]()
        self._context = self._turn = 0
        self._last: Event | None = None

    def next(self) -> Event | None:
        """Return the event that is foreseen."""
        return self._after_all.get(self._context) or self._after_last.get(self._last)

    def note(self, event: Event) -> None:
        """Note an event; a forward begins a turn, whose events are foreseen from it and those of the turn before."""
        if len(self._after_all) > _KNOWN:
            self._after_all.clear()
        self._after_all[self._context] = self._after_last[self._last] = event
        self._context, self._turn, self._last = hash((self._context, event)), hash((self._turn, event)), event
        if event[1] == FORWARD:
            self._context, self._turn = self._turn, 0


class EventOrder:
    """Events on this rank in all models that some ranks run together.

    Attributes:
        place: the number of forwards begun, and of events since the last one.
    """

    def __init__(self, world: World, key: str, ranks: Sequence[int]) -> None:
        self._world, self._key, self._ranks = world, key, ranks
        self._noted: list[tuple[tuple[int, int], Event, str]] = []
        self._foresight, self._is_new = Foresight(), False
        self.place = 0, 0
        self.models = 0

    def forget(self) -> None:
        """Foresee nothing after an exception, which may have come at another place on each rank."""
        self._foresight, self._is_new = Foresight(), True

    def event(self, event: Event, words: Callable[[Event], str], *, always: bool) -> tuple[int, str] | None:
        """Note that an event is about to begin; return the rank that does not make it and what that does instead.

        Args:
            event: the event.
            words: returns what a rank does in an event, for messages.
            always: whether it is compared also if it was foreseen.
        """
        if self._is_new and event[1] == FORWARD:
            self.place, self._is_new = (self.place[0] + 1, 0), False
        foreseen = self._foresight.next()
        channel = self._world.channel
        if channel is not None and (always or event != foreseen):
            # The neighbours wait for this rank too, so they are at most one published event ahead.
            self._noted = [*self._noted[-1:], (self.place, event, words(event))]
            channel.note(self._key, json.dumps(self._noted))
            at, ranks = self._ranks.index(self._world.placement.rank), self._ranks
            with self._world.part(Activity).waiting(), self._world.part(EventOrders).waiting():
                for other in {ranks[(at + step) % len(ranks)] for step in (1, -1)}:
                    seen, its = self._wait_for(other, event)
                    if not DECISIONS[seen]:
                        was = foreseen if foreseen != event else None
                        return other, words(was) if seen is Seen.PAST and was else its
        self._foresight.note(event)
        turn, count = self.place
        self.place = (turn + 1, 0) if event[1] == FORWARD else (turn, count + 1)
        return None

    def _wait_for(self, other: int, event: Event) -> tuple[Seen, str]:
        """Wait until there is something to decide about another rank; return that, and what it does."""
        channel = self._world.channel
        assert channel is not None
        asked_at, is_past = time.monotonic(), False
        before, since = list[Any](), asked_at
        while True:
            for at, its, words in json.loads(channel.noted(self._key, other) or "[]"):
                if tuple(at) == self.place:
                    return Seen.SAME if tuple(its) == event else Seen.OTHER, words
                is_past = is_past or tuple(at) > self.place
            if is_past:
                return Seen.PAST, "does something else"
            time.sleep(PAUSE_SECONDS)
            now = time.monotonic()
            if now - asked_at <= ASK_SECONDS:
                continue
            asked_at, answers = now, self._world.part(EventOrders).ask(other, self._key)
            at, why, _ = answers[0]
            is_past = tuple(at) > self.place
            if answers != before:
                before, since = answers, now
            if why.startswith("has left") and not is_past:
                return Seen.LEFT, why
            if all(reason for _, reason, _ in answers) and now - since > STUCK_SECONDS and not is_past:
                return Seen.STUCK, why


class EventOrders(RunPart):
    """Orders of events of a run on this rank, which answers other ranks where it is.

    Attributes:
        has_left: whether this rank is at the end of the run.
    """

    def __init__(self, world: World) -> None:
        self._world, self.has_left, self._waits = world, False, False
        self._orders: dict[str, EventOrder] = {}
        self._name = f"events {world.count('event orders')}"
        if world.channel is not None:
            world.channel.work.serve(f"{self._name}/{world.placement.rank}", self._where)

    def of(self, ranks: Sequence[int]) -> EventOrder:
        """Return the order of events of models that these ranks run together."""
        key = (
            f"{self._name}/{','.join(map(str, ranks))}" if len(ranks) < self._world.placement.world_size else self._name
        )
        if key not in self._orders:
            self._orders[key] = EventOrder(self._world, key, ranks)
        return self._orders[key]

    def ask(self, other: int, key: str) -> list[Any]:
        """Return where a rank is, why it does not move, and its collectives; of all ranks if none of them moves."""
        channel, own = self._world.channel, self._world.placement.rank
        assert channel is not None
        answers: list[Any] = []
        for rank in (other, *(each for each in range(self._world.placement.world_size) if each not in (other, own))):
            answers.append(json.loads(channel.work.ask(f"{self._name}/{rank}", rank, key)))
            if not answers[-1][1]:
                break
        return answers

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this rank waits at an event."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def close(self) -> None:
        """Note that this rank comes to no more events."""
        self.has_left = True

    def _where(self, key: str | None, waited: float) -> bytes:
        """Answer another rank; runs in the channel's thread."""
        order, channel = self._orders.get(key or ""), self._world.channel
        if self.has_left or key is None:
            return json.dumps([[0, 0], "has left the function", 0]).encode()
        assert channel is not None
        stands = self._waits or any(file.endswith(_COLLECTIVES) for file, *_ in stacks.of_thread())
        why = f"is {channel.reporter.location()}" if stands else ""
        return json.dumps([(0, 0) if order is None else order.place, why, collectives_begun()]).encode()


class Rendezvous:
    """Events of one model on this rank.

    Args:
        model: the name of the model, for messages.
        ranks: the ranks that run it together; by default all.
        units: the names of the parameters of each unit.
        does: the verb for a unit that averages no gradients.

    Attributes:
        forwards: the number of forwards that have begun.
    """

    def __init__(
        self, model: str, ranks: Sequence[int] | None = None, units: Sequence[list[str]] = (), does: str = "gathers"
    ) -> None:
        world = current_world()
        self._model, self._units, self._does, self._world = model, units, does, world
        self._ranks = range(world.placement.world_size) if ranks is None else ranks
        self._order = world.part(EventOrders).of(self._ranks)
        self._order.models += 1
        self._number, self.forwards, self._in_row, self._reads = self._order.models, 0, 0, 0
        self._had_gradients: bool | None = None

    def forward(self, averages: bool = False) -> None:
        """Note that a forward begins, and whether its backward averages gradients.

        Raises:
            CollectiveError: another rank does something else.
        """
        if in_backward():  # a recomputation is part of a backward of all ranks
            return
        has_gradients = torch.is_grad_enabled()
        self.forwards, is_same = self.forwards + 1, has_gradients is self._had_gradients
        self._in_row, self._had_gradients = self._in_row + 1 if is_same else 1, has_gradients
        detail = has_gradients + 2 * (has_gradients and averages)
        self._come_to((self._number, FORWARD, detail), None if has_gradients else self._in_row)

    def exchange(self, unit: int, gradients: int) -> None:
        """Note that an exchange of a unit is about to begin.

        Raises:
            ModelError: another rank does something else.
        """
        self._come_to((self._number, unit, gradients))

    def read(self, *, always: bool = True) -> None:
        """Note that a number of divided tensors is about to be read.

        Args:
            always: whether ranks are compared also where all of them have foreseen it.

        Raises:
            CollectiveError: another rank does something else.
        """
        self._reads += 1
        self._come_to((self._number, READ, 0), self._reads if always else None)

    def held(self) -> ComparedTensor:
        """Return the number of forwards, to compare ranks of which one may step more often than the others."""
        part = f"{self._ranks[0]}: {named_ranks(self._ranks)}"
        return ComparedTensor("the number of forwards until then", part, self.forwards)

    def forget(self) -> None:
        """Compare the next event after an exception in a forward or its backward."""
        self._order.forget()

    def _come_to(self, event: Event, number: int | None = None) -> None:
        # Comparisons between nodes load the store, so there are few of them.
        always = number is not None and (self._world.placement.nnodes == 1 or is_power_of_two(number))
        found = self._order.event(event, self._words, always=always)
        if found is not None:
            self._refuse(event, *found)

    def _words(self, event: Event) -> str:
        model, what, detail = event
        if model != self._number:
            return "runs another model"
        if what == FORWARD:
            return f"runs forward {self._in_row} of {self._model} {'with' if detail else 'without'} gradients"
        if what == READ:
            return "takes a number of divided tensors, as weight.norm().item(), or their whole weights"
        names = self._units[what]
        without = [name for place, name in enumerate(names) if not detail >> place & 1]
        if detail == GATHER:
            return f"{self._does} {_quoted(names)}"
        return f"has no gradients of {_quoted(without)}" if without else f"has gradients of all of {_quoted(names)}"

    def _refuse(self, event: Event, other: int, its: str) -> NoReturn:
        found = f"rank {self._world.placement.rank} {self._words(event)}, and rank {other} {its}."
        if event[1] == READ:
            raise CollectiveError(f"{found} All ranks take part in it: do it on every rank, and print on one.")
        if event[1] == FORWARD:
            raise CollectiveError(
                f"{found} All ranks take part in each forward of a divided model: run it equally often on every rank, "
                "by distwrap.lockstep(loader) and without a condition such as 'if rank() == 0', or load what "
                "distwrap.save() has written into a plain model."
            )
        way_out = (
            "Give zeros to parameters that have no gradient on some ranks, by "
            "model.set_reduce_scatter_unused_params(True)"
            if event[2] > 0
            else "Make a module that runs on some ranks only, as an expert, a part of a larger unit, by wrap=['Block']"
        )
        if its.startswith("has left"):
            way_out = "Look for a return, a break or a loop that differs between ranks"
        raise ModelError(
            f"in forward {self.forwards} of {self._model} or its backward, {found[:-1]}. Their numbers would be "
            "mixed up: all ranks must use the same units of a divided model in the same order, whatever their data. "
            f"{way_out}."
        )


def _quoted(names: list[str]) -> str:
    return first_names(list(map(repr, names)))


class SameBatch:
    """Comparison of the inputs of ranks that compute a batch together, at pass 1, 2, 4, 8, ….

    Args:
        group: the ranks.
        device: the device on which they compute.
        what: a description of the ranks, for messages.
        draws_alike: whether they draw the same random numbers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, what: str, *, draws_alike: bool) -> None:
        self._group, self._ranks, self._device = group, dist.get_process_group_ranks(group), device
        self._what, self._draws_alike, self._passes = what, draws_alike, 0

    def check(self, name: str, given: Any) -> None:
        """Compare the arguments of a method.

        Raises:
            ModelError: the ranks have different arguments.
        """
        self._passes += 1
        if self._passes == 1 and self._draws_alike:  # a loop may have seeded the generators by rank
            state = torch.get_rng_state().to(self._device)
            dist.broadcast(state, self._ranks[0], self._group)
            torch.set_rng_state(state.cpu())
        if not is_power_of_two(self._passes):
            return
        plain = mix(name, *(repr(leaf) for leaf in tree_leaves(given) if isinstance(leaf, _PLAIN)))
        held = [ComparedTensor(f"tensor {number}", "", tensor) for number, tensor in enumerate(tensors_in(given))]
        everyone: list[Any] = [None] * len(self._ranks)
        own = fingerprints([*held, ComparedTensor(f"{name}() with its other arguments", "", float(plain % 2**48))])
        dist.all_gather_object(everyone, own, self._group)
        difference = first_difference(everyone, ranks=self._ranks)
        if difference is not None:
            passes, self._passes = self._passes, 0
            raise ModelError(
                f"{self._what} compute one batch together, but were given different ones: {difference}, in pass "
                f"{passes}. {_BATCH_HINT}"
            )
