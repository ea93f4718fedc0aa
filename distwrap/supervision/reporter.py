"""Endpoint of the hang report on one rank, which says where the rank is when it is asked, and can ask all ranks."""

import json
import math
import time
from collections.abc import Callable

from distwrap._internals.torch import collectives_begun
from distwrap.environments import Placement
from distwrap.network.keys import count
from distwrap.network.waiting import Clock, count_in
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity
from distwrap.supervision.hang_report import ask, ask_all, read_answers
from distwrap.supervision.locations import Location, merge
from distwrap.supervision.notes import RankNotes
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.waits import Wait


class Reporter:
    """Endpoint of the hang report on this rank: it answers when the rank is asked where it is, and can ask all ranks.

    Args:
        notifier: the notifier of the ranks.
        notes: the notes in which this rank writes where it is.
        placement: this rank's place.
        activity: the last helper that ran on it.
        clock: the clock by which it notes, and waits for answers.

    Attributes:
        failed_at: the stack on which this rank failed, which stays its location while it reports the failure.
        waits: a function that returns the wait for other ranks in which this one is.
    """

    def __init__(
        self, notifier: Notifier, notes: RankNotes, placement: Placement, activity: Activity, clock: Clock = time
    ) -> None:
        self._notifier, self._notes, self._store = notifier, notes, notifier.store
        self._place, self._activity, self._clock = placement, activity, clock
        self.failed_at: list[stacks.Line] | None = None
        self.waits: Callable[[], Wait | None] = lambda: None
        self._answered = 0
        self._noted = -math.inf
        # Once a second and node in a store elsewhere, and some hundred times a second in all.
        seconds = min(30.0, max(1.0, placement.local_world_size, placement.world_size / 256))
        self._note_seconds = 0.0 if notifier.is_held else seconds

    def location(self) -> Location:
        """Return where this rank is."""
        lines = self.failed_at if self.failed_at is not None else stacks.of_thread()
        what, where = stacks.locate(lines)
        helper = self._activity.helper
        if self._activity.site == where and (helper.startswith(f"{what} ") or what == "share_result"):
            what = helper  # it knows of what, as the path of a save
        return Location(what, where, self._activity.step, str(self._activity))

    def position(self, request: object, waited: float) -> bytes | None:
        """Answer one rank that asks where this one is, for what it waits, and how much it has begun."""
        if request is None:  # this rank leaves
            return None
        answer = [str(self.location()), self.waits(), self._activity.begun(), collectives_begun() or 0]
        return json.dumps(answer).encode()

    def look(self, notified: bool = True) -> None:
        """Answer if this rank was asked.

        Args:
            notified: whether somebody may have asked.
        """
        asked = count(self._store, "reports") if notified else 0
        if asked > self._answered:
            self._answer(asked)

    def note(self, location: Location) -> None:
        """Note where this rank is, for when it cannot answer; in a store elsewhere only now and then."""
        now = self._clock.monotonic()
        if now - self._noted >= self._note_seconds:
            self._noted = now
            self._notes.write("seen", [time.time(), location])

    def ask_all(self) -> str:
        """Ask all ranks from another thread than the one that answers."""
        return ask_all(self._store, self._place.world_size, self._notifier.notify_all, clock=self._clock)

    def ask_others(self) -> str:
        """Ask all ranks from the thread that answers, which answers for this rank first."""
        return ask_all(self._store, self._place.world_size, self._notifier.notify_all, self._answer, self._clock)

    def locations(self) -> dict[int, Location | str]:
        """Ask as `ask_others` does; return where each rank is, or words where it does not say."""
        size = self._place.world_size
        asked, said = ask(self._store, size, self._notifier.notify_all, self._answer, self._clock)
        found = read_answers(self._store, size, asked)
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
