"""Hang report: it asks every rank where it is and what it did last, and lists the answers, equal ones in one line."""

import contextlib
import inspect
import json
import math
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap._internals.torch_data import batches_given
from distwrap._internals.torch_groups import collectives_begun
from distwrap.environments import Placement
from distwrap.frames import OURS
from distwrap.network.keys import count, read, read_all
from distwrap.network.waiting import are_all_counted, count_in, wait_until
from distwrap.places import place
from distwrap.stopwatch import Item, Part, Stopwatch
from distwrap.supervision import stacks
from distwrap.supervision.bells import Bells, ring_from_outside
from distwrap.supervision.locations import LEFT, NO_ANSWER, Location, merge, seen_at
from distwrap.supervision.notes import RankNotes, read_note
from distwrap.supervision.waits import Wait, read_wait

ANSWER_SECONDS = 1.5  # for a rank to say where it is


class Activity:
    """Last helper that the user's code called, the place of the call, and the progress of its loader.

    Attributes:
        helper: the name of the helper, or empty.
        site: the file and line of the call.
        collectives: the number of distwrap's collectives that this rank has begun, in which all ranks take part.
        turns: the number of turns that it has begun in loops which all ranks go through together, including the last
            one, in which it tells the others that it has left.
        averages: a function that returns two numbers: how often the count of averages of gradients was started anew,
            and twice the number of averages begun since. The second one is odd during another exchange of the models
            between two averages.
        stopwatch: the stopwatch of a run that reports where its time goes.
        bar: a function that returns the text that a progress bar of the loop shows beside its progress, as the loss.
    """

    def __init__(self, world: object) -> None:
        self.helper = ""
        self.site = ""
        self.collectives = self.turns = 0
        self.averages: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._loops: list[weakref.ref[Any]] = []  # that are under way, the innermost last
        self.stopwatch: Stopwatch | None = None
        self.bar: Callable[[], str] = lambda: ""

    def record(self, helper: str) -> None:
        """Note that a helper runs, and who called it."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        self.helper = helper
        self.site = place(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""

    def begun(self) -> tuple[int, int, int, int]:
        """Return what this rank has begun: eras, averages, collectives, turns."""
        return (*self.averages(), self.collectives, self.turns)

    def follow(self, batches: Iterable[Any]) -> None:
        """Remember a loader's iterator, to read the step from it when asked: counting would cost each step."""
        self._loops = [each for each in self._loops if each() is not None and each() is not batches]
        self._loops.append(weakref.ref(batches))

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Return the batches; in a run that measures its time, the time to fetch each one is counted."""
        return batches if self.stopwatch is None else self.stopwatch.timed(batches)

    def part(self, part: Part) -> AbstractContextManager[None]:
        """Count the time within a ``with`` as one part of the loop's time, in a run that measures it."""
        return nullcontext() if self.stopwatch is None else self.stopwatch.part(part)

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time within a ``with`` as waiting for other ranks, or, in a checkpoint, as the checkpoint."""
        is_checkpoint = self.stopwatch is not None and self.stopwatch.is_open(Part.CHECKPOINT)
        return nullcontext() if is_checkpoint else self.part(Part.EXCHANGE)

    @property
    def loop(self) -> Any:
        """The innermost loader's iterator whose loop is under way; ``None`` where there is none."""
        return next((batches for each in reversed(self._loops) if (batches := each()) is not None), None)

    @property
    def step(self) -> int | None:
        """Number of batches that the innermost loader has given; ``None`` if it is unknown."""
        batches = self.loop
        step = getattr(batches, "step", None)  # of a lockstep loop
        return step if isinstance(step, int) else batches_given(batches)

    def wait(self) -> None: ...

    def conclude(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...

    def __str__(self) -> str:
        return f"{self.helper} at {self.site}" if self.helper else ""


class Reporter:
    """Endpoint of the hang report on this rank: it answers when the rank is asked where it is, and can ask all ranks.

    Args:
        bells: the bells of the ranks.
        notes: the notes in which this rank writes where it is.
        placement: this rank's place.
        activity: the last helper that ran on it.

    Attributes:
        failed_at: the stack on which this rank failed, which stays its location while it reports the failure.
        waits: a function that returns the wait for other ranks in which this one is.
    """

    def __init__(self, bells: Bells, notes: RankNotes, placement: Placement, activity: Activity) -> None:
        self._bells, self._notes, self._store = bells, notes, bells.store
        self._place, self._activity = placement, activity
        self.failed_at: list[stacks.Line] | None = None
        self.waits: Callable[[], Wait | None] = lambda: None
        self._answered = 0
        self._noted = -math.inf
        # Once a second and node in a store elsewhere, and some hundred times a second in all.
        seconds = min(30.0, max(1.0, placement.local_world_size, placement.world_size / 256))
        self._note_seconds = 0.0 if bells.is_held else seconds

    def location(self) -> Location:
        """Return where this rank is."""
        lines = self.failed_at if self.failed_at is not None else stacks.of_thread()
        what, where = stacks.locate(lines)
        helper = self._activity.helper
        if self._activity.site == where and (helper.startswith(f"{what} ") or what == "share_result"):
            what = helper  # it knows of what, as the path of a save
        return Location(what, where, self._activity.step, str(self._activity))

    def look(self, rung: bool = True) -> None:
        """Answer if this rank was asked.

        Args:
            rung: whether somebody may have asked.
        """
        asked = count(self._store, "reports") if rung else 0
        if asked > self._answered:
            self._answer(asked)

    def note(self, location: Location) -> None:
        """Note where this rank is, for when it cannot answer; in a store elsewhere only now and then."""
        now = time.monotonic()
        if now - self._noted >= self._note_seconds:
            self._noted = now
            self._notes.write("seen", [time.time(), location])

    def ask_all(self) -> str:
        """Ask all ranks from another thread than the one that answers."""
        return ask_all(self._store, self._place.world_size, self._bells.ring_all)

    def ask_others(self) -> str:
        """Ask all ranks from the thread that answers, which answers for this rank first."""
        return ask_all(self._store, self._place.world_size, self._bells.ring_all, self._answer)

    def locations(self) -> dict[int, Location | str]:
        """Ask as `ask_others` does; return where each rank is, or words where it does not say."""
        size = self._place.world_size
        asked, said = _ask(self._store, size, self._bells.ring_all, self._answer)
        found = _answers(self._store, size, asked)
        if said is None:
            self._store.set(f"said/{asked}", merge(found))
        return found

    def _answer(self, asked: int) -> None:
        if asked <= self._answered:
            return
        self._answered = asked
        answer = self.location()._replace(wait=self.waits(), begun=collectives_begun() or 0)
        self._store.set(f"report/{asked}/{self._place.rank}", json.dumps(answer))
        count_in(self._store, f"answers/{asked}", self._place.world_size)


def ask_all(
    store: Store,
    world_size: int,
    ring: Callable[[], None] | None = None,
    on_asking: Callable[[int], None] = lambda number: None,
) -> str:
    """Ask all ranks where they are, and return it in lines, equal ones together.

    Args:
        store: the ranks'.
        world_size: number of ranks.
        ring: lets all ranks look; by default from a process that is none of them.
        on_asking: called with the number of the question, to answer for this rank.

    Raises:
        DistError: the store is gone.
    """
    asked, said = _ask(store, world_size, ring or partial(ring_from_outside, store, world_size), on_asking)
    if said is None:
        said = merge(_answers(store, world_size, asked))
        store.set(f"said/{asked}", said)
    return said


def _ask(
    store: Store, world_size: int, ring: Callable[[], None], on_asking: Callable[[int], None]
) -> tuple[int, str | None]:
    """Ask all ranks where they are; return the question's number, and the answer if another rank was asking already.

    If several ranks ask at the same time, one of them does, and the others read its answer: if each of a thousand ranks
    asked all others, none would get its answers in time.
    """
    asked, mine = count(store, "reports"), secrets.token_hex(8)
    is_under_way = asked > 0 and not store.check([f"said/{asked}"])
    asked += not is_under_way
    if not is_under_way and store.compare_set(f"asking/{asked}", "", mine).decode() == mine:
        store.add("reports", 1)
        ring()
        on_asking(asked)
        are_all_counted(store, f"answers/{asked}", 1, ANSWER_SECONDS)
        return asked, None
    on_asking(asked)
    said = wait_until(lambda: read(store, f"said/{asked}"), 2 * ANSWER_SECONDS, longest_pause=0.25)
    return asked, said.decode() if said else None


def _answers(store: Store, world_size: int, asked: int) -> dict[int, Location | str]:
    keys = [f"report/{asked}/{rank}" for rank in range(world_size)]
    if store.check([f"answers/{asked}/all"]):
        answers = read_all(store, keys)
        return {rank: _read_location(answer) for rank, answer in enumerate(answers)}
    return {rank: _answer_of(store, rank, key) for rank, key in enumerate(keys)}


def last_seen(store: Store, rank: int) -> str:
    """Return in words where a rank was when it last noted that; empty if it never did, or the store is gone."""
    with contextlib.suppress(OverflowError, RuntimeError, TypeError, ValueError):  # or it is none of a rank's
        moment, parts = read_note(store, "seen", rank) or (0.0, ())
        if parts:
            return seen_at(moment, Location(*parts))
    return ""


def _read_location(text: bytes) -> Location | str:
    """Return the location that a rank has written, or words if another program has written something else there."""
    with contextlib.suppress(RecursionError, TypeError, ValueError):
        location = Location(*json.loads(text))
        return location._replace(wait=read_wait(location.wait), begun=int(location.begun))
    return "has an answer in the store that no rank has written"


def _answer_of(store: Store, rank: int, key: str) -> Location | str:
    answer = read(store, key)
    if answer:
        return _read_location(answer)
    if store.check([f"left/{rank}"]):
        return LEFT
    return f"{NO_ANSWER}{last_seen(store, rank)}"
