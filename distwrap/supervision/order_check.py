"""Notice that ranks have parted, as by a `break` on one of them: what they wait for will never come.

All ranks begin the same averages of gradients, the same collectives of distwrap and the same turns of loops that they
take together, in one order. So of two ranks one has begun at least as many of each as the other. Where one is ahead in
averages and the other in collectives, they wait for each other, and nobody need wait until the time limit to say so.
"""

import threading
import time

from distwrap.environments import Placement
from distwrap.supervision.activity import Activity
from distwrap.supervision.notes import RankNotes

_PATIENCE = 1.0  # seconds in which a rank has begun nothing, after which it compares; each time twice as many
_LONGEST = 60.0

WAY_OUT = (
    "Let all ranks leave a loop, or a step of it, together: distwrap.agree(flag) before the break, or "
    "distwrap.lockstep(loader), with its stop() and skip=."
)

# Eras in which averages were counted anew, averages in this one, twice (between two there may be another exchange of
# the models'), collectives, turns of loops.
Begun = tuple[int, int, int, int]


class OrderCheck:
    """Check on one rank, by its channel's thread.

    Args:
        notes: in which ranks say what they have begun.
        placement: this rank's place.
        activity: of this rank, which counts it.
    """

    def __init__(self, notes: RankNotes, placement: Placement, activity: Activity) -> None:
        self._notes, self._place, self._activity = notes, placement, activity
        self._begun, self._since, self._patience = (0, 0, 0, 0), time.monotonic(), _PATIENCE
        self._noted = self._begun
        self._lock = threading.Lock()

    def begin_anew(self) -> None:
        """Count from zero again, as all ranks do now, none of which goes on before every rank has.

        A note of before would say that this rank is ahead where others have begun more since.
        """
        with self._lock:
            self._activity.collectives = self._activity.turns = 0
            self._begun = self._noted = (0, 0, 0, 0)
            self._notes.write("begun", self._noted)

    def look(self) -> str:
        """Return in words that ranks have parted; empty where they have not. Called four times a second."""
        with self._lock:
            return self._look()

    def _look(self) -> str:
        begun, now = self._activity.begun(), time.monotonic()
        if begun != self._begun:
            self._begun, self._since, self._patience = begun, now, _PATIENCE
        if now - self._since < self._patience:
            return ""
        self._since, self._patience = now, min(_LONGEST, 2 * self._patience)
        if begun != self._noted:
            self._noted = begun
            self._notes.write("begun", begun)
        if begun == (0, 0, 0, 0):
            return ""
        for rank in range(self._place.world_size):
            told = self._notes.read("begun", rank) if rank != self._place.rank else None
            if told and (words := parted({self._place.rank: begun, rank: tuple(told)})):
                return words
        return ""


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
