"""Notice that ranks have parted, as by a `break` on one of them: what they wait for will never come.

All ranks begin the same averages of gradients, the same collectives of distwrap and the same turns of loops that they
take together, in one order. So of two ranks one has begun at least as many of each as the other. Where one is ahead in
averages and the other in collectives, they wait for each other, and nobody need wait until the time limit to say so.
Each rank compares with the next one alone: where any two have parted, so have two neighbours in the ring of ranks.
"""

import threading
import time

from distwrap.environments import Placement
from distwrap.network.waiting import Clock
from distwrap.supervision.activity import Activity
from distwrap.supervision.notes import RankNotes
from distwrap.supervision.waits import MainThread

_PATIENCE = 1.0  # seconds in which a rank has begun nothing, after which it compares; each time twice as many
_LONGEST = 60.0

_TOGETHER = (
    "Let all ranks leave a loop, or a step of it, together: distwrap.agree(flag) before the break, or "
    "distwrap.lockstep(loader), with its stop() and skip=."
)
SAME_CALLS = (
    "All ranks must make the same calls in the same order: take them out of what only some ranks run, as under "
    "`if rank() == 0`."
)

# Eras in which averages were counted anew, averages in this one, twice (between two there may be another exchange of
# the models'), collectives, turns of loops.
Begun = tuple[int, int, int, int]
# The latest collectives of distwrap that a rank has begun, in the last of which it waits, by their numbers: name and
# place. One that is made of others comes before them.
Calls = dict[int, tuple[str, str]]


class OrderCheck:
    """Check on one rank, by its channel's thread.

    Args:
        notes: in which ranks say what they have begun.
        placement: this rank's place.
        activity: of this rank, which counts it.
        thread: this rank's main thread, which may wait for others.
        clock: the clock by which it looks.
    """

    def __init__(
        self, notes: RankNotes, placement: Placement, activity: Activity, thread: MainThread, clock: Clock = time
    ) -> None:
        self._notes, self._activity, self._thread, self._clock = notes, activity, thread, clock
        self._rank, self._next = placement.rank, (placement.rank + 1) % placement.world_size
        self._begun, self._since, self._patience = (0, 0, 0, 0), self._clock.monotonic(), _PATIENCE
        self._noted: tuple[Begun, Calls] = self._begun, {}
        self._lock = threading.Lock()

    def begin_anew(self) -> None:
        """Count from zero again, as all ranks do now, none of which goes on before every rank has.

        A note of before would say that this rank is ahead where others have begun more since.
        """
        with self._lock:
            self._activity.begin_anew()
            self._begun = self._activity.begun()
            self._noted = self._begun, {}
            self._notes.write("begun", self._noted)

    def look(self) -> tuple[str, str] | None:
        """Return in words that ranks have parted, and what to do; ``None`` if not. Called four times a second."""
        with self._lock:
            return self._look()

    def _look(self) -> tuple[str, str] | None:
        begun, now = self._activity.begun(), self._clock.monotonic()
        if begun != self._begun:
            self._begun, self._since, self._patience = begun, now, _PATIENCE
        if now - self._since < self._patience:
            return None
        self._since, self._patience = now, min(_LONGEST, 2 * self._patience)
        calls = self._activity.latest if self._thread.wait() is not None else {}
        if (begun, calls) != self._noted:
            self._noted = begun, calls
            self._notes.write("begun", self._noted)
        noted = self._notes.read("begun", self._next) if begun != (0, 0, 0, 0) and self._next != self._rank else None
        if not noted:
            return None
        theirs, latest = noted
        if words := parted({self._rank: begun, self._next: tuple(theirs)}):
            return words, _TOGETHER
        their_calls = {int(number): (name, where) for number, (name, where) in latest.items()}
        words = crossed({self._rank: calls, self._next: their_calls})
        return (words, SAME_CALLS) if words else None


def crossed(calls: dict[int, Calls]) -> str:
    """Return in words that two ranks wait in different collectives, each of which is the next one; empty if not.

    Example:
        >>> crossed({1: {4: ("barrier", "a.py:9")}, 0: {4: ("gather", "a.py:5"), 5: ("gather_object", "a.py:5")}})
        'rank 0 waits in gather at a.py:5, and rank 1 in barrier at a.py:9: they will never meet'
        >>> crossed({0: {7: ("mean", "a.py:5")}, 1: {7: ("mean", "a.py:9")}})
        ''
    """
    (one, its), (other, theirs) = sorted(calls.items())
    if not its or not theirs:
        return ""
    number = min(max(its), max(theirs))  # in which one of them waits
    (name, place), (their_name, their_place) = its.get(number, ("", "")), theirs.get(number, ("", ""))
    if not name or not their_name or name == their_name:
        return ""
    them = f"rank {other} in {their_name} at {their_place}"
    return f"rank {one} waits in {name} at {place}, and {them}: they will never meet"


def parted(begun: dict[int, Begun]) -> str:
    """Return in words how two ranks have parted; empty where they may still meet.

    Example:
        >>> parted({0: (0, 104, 0, 0), 1: (0, 102, 1, 0)})[:66]
        'rank 1 has left the training after 51 averages of gradients, and w'
        >>> parted({0: (0, 0, 7, 4), 1: (0, 0, 6, 5)})[:66]
        'rank 1 has left a step of a loop that all ranks go through togethe'
        >>> parted({0: (0, 104, 0, 0), 1: (0, 102, 0, 0)})
        ''
    """
    (one, (era, averages, *others)), (other, (their_era, theirs, *their_others)) = begun.items()
    ahead_in = [mine - their for mine, their in zip((averages, *others), (theirs, *their_others), strict=True)]
    if era != their_era or not min(ahead_in) < 0 < max(ahead_in):
        return ""
    if averages != theirs:
        ahead, behind = (one, other) if averages > theirs else (other, one)
        return (
            f"rank {behind} has left the training after {min(averages, theirs) // 2} averages of gradients, and waits "
            f"in another collective, while rank {ahead} waits for it in the next one: they will never meet"
        )
    ahead, behind = (one, other) if ahead_in[1] > 0 else (other, one)
    return (
        f"rank {behind} has left a step of a loop that all ranks go through together, while rank {ahead} waits for it "
        f"in a collective of this step: they will never meet"
    )
