"""Observer of this rank's main thread: it prints a notice of a long wait, and finds out that no rank moves any more."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.network.keys import count
from distwrap.network.waiting import Clock
from distwrap.supervision.locations import Location, merge
from distwrap.supervision.reporter import Reporter
from distwrap.supervision.waits import MainThread, Wait
from distwrap.wording import named_ranks, print_notice

GROWS = 4  # times as long ranks wait at a place until it is said again
SETTLE_SECONDS = 1.0  # until it is said that a wait is over: a rank that fails is gone by then
COLLECTIVE_SECONDS = 1.0  # after the time limit, for a collective to say itself that it has timed out
_JUST_COME = 1.0  # seconds; who has stood shorter does not wait yet


class Notice(NamedTuple):
    """Words about a wait.

    Attributes:
        text: what is printed while the wait lasts.
        over: the beginning of the sentence that is printed when it is over.
    """

    text: str
    over: str


class Observer:
    """Observer of this rank's main thread, by the channel's thread.

    Args:
        store: the ranks' store, in which one of the waiting ranks claims the notice, and ranks that stand are counted.
        placement: this rank's place.
        reporter: the reporter that asks where all ranks are.
        thread: the main thread.
        seconds: the length of a wait after which a notice is printed; 0 is never.
        timeout: seconds after which a collective ends by itself, and a run in which no rank moves counts as stalled.
        clock: the clock by which it looks.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        reporter: Reporter,
        thread: MainThread,
        seconds: float,
        timeout: float,
        clock: Clock = time,
    ) -> None:
        self._store, self._place, self._reporter, self._thread = store, placement, reporter, thread
        self._seconds = seconds if placement.world_size > 1 else 0.0
        self._timeout, self._clock = timeout, clock
        self._patience: dict[str, float] = {}  # at each place where ranks have waited, which grows
        self._due, self._stood, self._is_still = self._seconds, 0.0, False
        self._claim, self._given = 0, ""  # the number of this rank's notice, and words for its end
        self._over = (0.0, "")  # when, and what is to be said of it

    def look(self) -> bool:
        """Print a notice if it is time for one; return true on the last rank to stand still, when all ranks do."""
        self._follow()
        when, text = self._over
        if text and self._clock.monotonic() - when >= SETTLE_SECONDS:
            self._over = 0.0, ""
            if self._reporter.failed_at is None:
                print_notice(text)
        if self._seconds and self._stood >= self._due:
            self._consider()
        return self._all_stand()

    def wait(self) -> Wait | None:
        """Return the wait for other ranks in which this one stands, or may stand; ``None`` if it is in none."""
        self._follow()
        return self._thread.wait()

    def _follow(self) -> None:
        if self._thread.look():
            self._end()
        self._stood = self._thread.stood

    def _all_stand(self) -> bool:
        still = self._thread.still >= self._timeout + COLLECTIVE_SECONDS
        if still == self._is_still:
            return False
        self._is_still, me = still, str(self._place.rank)
        standing = self._store.add("still", 1 if still else -1)
        return standing == self._place.world_size and bool(self._store.compare_set("stalled", "", me).decode() == me)

    def _consider(self) -> None:
        """Print that ranks wait, if they do, and no other rank has printed it."""
        self._due = self._stood + self._seconds  # until it is considered again
        if self._thread.wait() is None:
            return
        here = str(self._reporter.location()._replace(step=None))
        patience = self._patience.get(here, self._seconds)
        if self._stood < patience:
            self._due = patience
            return
        if not self._claim:
            last = count(self._store, "waits")
            if last and not self._store.check([f"wait/{last}/over"]):
                self._patience[here] = self._due = GROWS * patience
                return  # another rank says it
            me = str(self._place.rank)
            if self._store.compare_set(f"wait/{last + 1}", "", me).decode() != me:
                return
            self._store.add("waits", 1)
            self._claim = last + 1
        began, locations = self._thread.moves, self._reporter.locations()
        notice = notice_of(self._place.rank, locations, self._seconds, self._timeout)
        self._follow()
        if notice is None or self._thread.moves != began:
            self._end()
            return
        self._due = self._patience[here] = GROWS * patience
        self._given = notice.over
        print_notice(notice.text)

    def _end(self) -> None:
        """Note that the wait is over."""
        if self._claim:
            self._store.set(f"wait/{self._claim}/over", "")
        if self._given:
            self._over = self._clock.monotonic(), f"{self._given} on after {self._stood:.0f} s"
        self._claim, self._given, self._due = 0, "", max(self._seconds, self._thread.stood + self._seconds)


def notice_of(rank: int, locations: Mapping[int, Location | str], seconds: float, timeout: float) -> Notice | None:
    """Return a notice of which ranks wait, and for whom; ``None`` if they do not wait, or no notice is needed.

    Args:
        rank: the rank that prints it.
        locations: the locations of all ranks, or words for a rank that does not answer.
        seconds: the length of a wait after which a notice is printed.
        timeout: seconds after which a collective ends by itself.

    Example:
        >>> from distwrap.supervision.waits import Wait
        >>> there = Location("backward", "train.py:26", wait=Wait(31.0, "exchange"), begun=8)
        >>> where = {0: Location("evaluate", "train.py:40", begun=7), 1: there, 2: there}
        >>> print(notice_of(1, where, 30, 600).text)
        ranks 1, 2 have waited 31 s for rank 0 (up to 600 s):
          rank 0 in evaluate at train.py:40
          ranks 1, 2 in backward at train.py:26
    """
    answers = {other: each for other, each in locations.items() if isinstance(each, Location)}
    waits = {other: each.wait for other, each in answers.items() if each.wait is not None}
    if any(wait.kind == "debugger" for wait in waits.values()):
        return None  # a person is at work there, and knows
    least, behind = min(_JUST_COME, seconds), min((each.begun for each in answers.values()), default=0)
    waits = {
        other: wait
        for other, wait in waits.items()
        if wait.seconds >= least and (wait.kind != "perhaps" or answers[other].begun > behind)
    }
    if rank not in waits:
        return None
    mine, busy = answers[rank], set(locations) - set(waits)
    together = [other for other in waits if (answers[other].what, answers[other].where) == (mine.what, mine.where)]
    awaited = busy.intersection(waits[rank].peers) or busy
    late = {other for other in awaited if other not in answers or answers[other].begun < mine.begun}
    if awaited:
        whom = named_ranks(late or awaited)
    elif len(together) < len(waits) and all(wait.seconds >= seconds for wait in waits.values()):
        whom = "each other"
    else:
        return None  # all are in one exchange, which may be a large one, or they are about to meet
    until = "as long as that takes" if waits[rank].kind == "work" else f"up to {timeout:g} s"
    who = f"{named_ranks(waits)} {'has' if len(waits) == 1 else 'have'} waited {waits[rank].seconds:.0f} s"
    over = f"{named_ranks(together)} {'goes' if len(together) == 1 else 'go'}"
    return Notice(f"{who} for {whom} ({until}):\n{merge(locations)}", over)
