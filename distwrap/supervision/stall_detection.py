"""Stall detection: when no rank has moved for the time limit, though none is in a collective, the run ends."""

import time

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.network.waiting import Clock
from distwrap.supervision import stacks

IDLE_CPU = 0.05  # of a core; a process that uses less, and whose main thread stays in the same line, does not move
COLLECTIVE_SECONDS = 1.0  # after the time limit, for a collective to say itself that it has timed out


class StallDetector:
    """Detector that finds out that no rank of the run moves any more.

    Args:
        store: the store in which ranks that do not move are counted.
        placement: this rank's place.
        timeout: seconds without any rank moving after which the run counts as stalled.
        clock: the clock by which it looks.
    """

    def __init__(self, store: Store, placement: Placement, timeout: float, clock: Clock = time) -> None:
        self._store, self._timeout, self._clock = store, timeout, clock
        self._rank, self._ranks = placement.rank, placement.world_size
        self._excuses = 0  # waits under way that may take as long as they like
        self._noted = False
        self._mark: tuple[int, int] | None = None
        self._cpu, self._time = self._clock.process_time(), self._clock.monotonic()
        self._still_since = self._time

    def excuse(self, on: bool) -> None:
        """Set whether this rank may stand still without counting as stalled."""
        self._excuses += 1 if on else -1

    def look(self) -> bool:
        """Note whether this rank stands still; return true on the last rank to do so, when all ranks do."""
        if self._main_thread_moved() or self._excuses:
            self._still_since = self._clock.monotonic()
        still = self._clock.monotonic() - self._still_since >= self._timeout + COLLECTIVE_SECONDS
        if still == self._noted:
            return False
        self._noted, me = still, str(self._rank)
        count = self._store.add("still", 1 if still else -1)
        return count == self._ranks and bool(self._store.compare_set("stalled", "", me).decode() == me)

    def _main_thread_moved(self) -> bool:
        """Return whether the main thread is in another line than before, or the process has used CPU time since."""
        frame = stacks.frame_of()
        mark = (id(frame), frame.f_lasti) if frame is not None else None
        del frame
        cpu, now = self._clock.process_time(), self._clock.monotonic()
        moved = mark != self._mark or cpu - self._cpu > IDLE_CPU * (now - self._time)
        self._mark, self._cpu, self._time = mark, cpu, now
        return moved
