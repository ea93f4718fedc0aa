"""Notice of a wait: when ranks have waited for others for a while, one of them says so, in one line for all."""

import json
import time
from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.network.keys import count, read
from distwrap.network.waiting import Clock
from distwrap.supervision.locations import Location, of_several
from distwrap.supervision.reporter import Reporter
from distwrap.supervision.waits import MainThread, Wait
from distwrap.wording import named_ranks, print_notice

GROWS = 4  # times as long ranks wait at a place until it is said again
SETTLE_SECONDS = 1.0  # until it is said that a wait is over: a rank that fails is gone by then
_JUST_COME = 1.0  # seconds; who has stood shorter does not wait yet
_MOST_PLACES = 3  # that are named


class Notice(NamedTuple):
    """Words about a wait.

    Attributes:
        text: the sentence that is printed while the wait lasts.
        who: the ranks that wait in one place, as the beginning of the sentence that is printed when their wait is over;
            others may still wait in theirs.
        where: the place of the wait.
    """

    text: str
    who: str
    where: str


class WaitNotice:
    """Notices of this rank's waits, which the channel's thread prints.

    Args:
        store: the ranks' store, in which one of the waiting ranks claims the notice.
        placement: this rank's place.
        reporter: the reporter that asks where all ranks are.
        thread: the main thread, which may wait.
        seconds: the length of a wait after which a notice is printed; 0 is never.
        timeout: seconds after which a collective ends by itself.
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
        self._patience: dict[tuple[str, str], float] = {}  # at each place where ranks have waited, which grows
        self._due, self._stood = self._seconds, 0.0
        self._given: list[tuple[int, Notice]] = []  # of this wait, by this rank, with their numbers
        self._over: tuple[float, str] | None = None  # when, and what is to be said of it

    def look(self) -> None:
        """Look whether the main thread waits, and print a notice if it is time for one."""
        self._follow()
        if self._over is not None and self._clock.monotonic() - self._over[0] >= SETTLE_SECONDS:
            text, self._over = self._over[1], None
            if self._reporter.failed_at is None:
                print_notice(text)
        if self._seconds and self._stood >= self._due:
            self._consider()

    def wait(self) -> Wait | None:
        """Return the wait for other ranks in which this one is; ``None`` if it is in none."""
        self._follow()
        return self._thread.wait()

    def _follow(self) -> None:
        if self._thread.look():
            self._end()
            self._due = self._seconds
        self._stood = self._thread.stood

    def _consider(self) -> None:
        """Print that ranks wait, if they do, and no other rank has printed it."""
        began = self._thread.moves
        self._due = self._stood + self._seconds  # until it is considered again
        wait, (what, where, *_) = self._thread.wait(), self._reporter.location()
        if wait is None:
            return
        patience = self._patience.get((what, where), self._seconds)
        if self._stood < patience:
            self._due = patience
            return
        number = self._claim(patience)
        notice = (
            notice_of(self._place.rank, self._reporter.locations(), self._seconds, self._timeout) if number else None
        )
        self._follow()
        if number and (notice is None or self._thread.moves != began):
            self._store.set(f"wait/{number}/over", "")
            return
        self._due = self._patience[what, where] = GROWS * patience
        if notice is not None:
            self._given.append((number, notice))
            print_notice(notice.text)

    def _claim(self, patience: float) -> int:
        """Return the number of the notice that this rank may print; 0 if another rank has printed one of this wait."""
        last = count(self._store, "waits")
        if last and not self._store.check([f"wait/{last}/over"]):
            _, theirs = json.loads(read(self._store, f"wait/{last}"))
            if float(theirs) >= patience:
                return 0
        number, mine = last + 1, json.dumps([self._place.rank, patience])
        if self._store.compare_set(f"wait/{number}", "", mine).decode() != mine:
            return 0
        self._store.add("waits", 1)
        return number

    def _end(self) -> None:
        """Note that the wait is over, and let this rank print so if it printed the last notice."""
        if not self._given:
            return
        for number, _ in self._given:
            self._store.set(f"wait/{number}/over", "")
        number, notice = self._given[-1]
        if count(self._store, "waits") == number:
            self._over = self._clock.monotonic(), f"{notice.who} on after {self._stood:.0f} s {notice.where}"
        self._given = []


def notice_of(rank: int, locations: Mapping[int, Location | str], seconds: float, timeout: float) -> Notice | None:
    """Return a notice of which ranks wait, and for whom; ``None`` if they do not wait, or no notice is needed.

    Args:
        rank: the rank that prints it.
        locations: the locations of all ranks, or words for a rank that does not answer.
        seconds: the length of a wait after which a notice is printed.
        timeout: seconds after which a collective ends by itself.

    Example:
        >>> there = Location("backward", "train.py:26", wait=Wait(31.0, "exchange"), begun=8)
        >>> where = {0: Location("evaluate", "train.py:40", begun=7), 1: there, 2: there}
        >>> print(notice_of(1, where, 30, 600).text.replace(" for ", "\\nfor ").replace(". ", ".\\n"))
        ranks 1, 2 have waited 31 s in backward at train.py:26
        for rank 0, which is in evaluate at train.py:40.
        They wait up to 600 s.
    """
    answers = {other: each for other, each in locations.items() if isinstance(each, Location)}
    if any(each.wait is not None and each.wait.kind == "debugger" for each in answers.values()):
        return None  # a person is at work there, and knows
    waits = _waits(answers, min(_JUST_COME, seconds))
    if rank not in waits:
        return None
    here, wait = _place(answers[rank]), waits[rank]
    places = _together({other: _place(answers[other]) for other in waits})
    (_, first), *others = sorted(places.items(), key=lambda item: item[0] != here)
    several = len(waits) > 1
    who = f"{named_ranks(first)} {'has' if len(first) == 1 else 'have'} waited {wait.seconds:.0f} s {here}"
    if others:
        who += f", and {_listed([f'{named_ranks(members)} {where}' for where, members in others])},"
    busy = {other: each for other, each in locations.items() if other not in waits}
    awaited = _awaited(answers[rank], _peers_of([waits[other] for other in first], busy))
    until = f"{'They wait' if several else 'It waits'} up to {timeout:g} s"
    if wait.worker in awaited:
        awaited = {wait.worker: awaited[wait.worker]}
        until = f"{'They wait' if several else 'It waits'} as long as that takes"
    if awaited:
        where_others = _together({other: str(each) for other, each in awaited.items()})
        whom = _listed(
            [f"{named_ranks(members)}, which {_does(what, members)}" for what, members in where_others.items()]
        )
    elif others and all(each.seconds >= seconds for each in waits.values()):
        whom = "each other"
    else:
        return None  # all are in one exchange, which may be a large one, or they are about to meet
    return Notice(f"{who} for {whom}. {until}.", f"{named_ranks(first)} {'goes' if len(first) == 1 else 'go'}", here)


def _waits(answers: Mapping[int, Location], least: float) -> dict[int, Wait]:
    """Return the waits of the ranks that wait; a rank that only may wait does so if other ranks are behind it."""
    behind = min(each.begun for each in answers.values())
    return {
        rank: each.wait
        for rank, each in answers.items()
        if each.wait is not None and each.wait.seconds >= least and (each.wait.kind != "perhaps" or each.begun > behind)
    }


def _awaited(mine: Location, others: Mapping[int, Location | str]) -> dict[int, Location | str]:
    """Return the ranks for which this one waits: those behind it that do not wait, if that is known."""
    elsewhere = {rank: each for rank, each in others.items() if isinstance(each, str) or _place(each) != _place(mine)}
    behind = {rank: each for rank, each in elsewhere.items() if isinstance(each, str) or each.begun < mine.begun}
    return behind or elsewhere


def _peers_of(waits: list[Wait], busy: Mapping[int, Location | str]) -> Mapping[int, Location | str]:
    """Return the busy ranks with which those that wait exchange, if that is known; all of them if none of those is."""
    peers = {rank: each for rank, each in busy.items() if any(rank in wait.ranks for wait in waits)}
    return peers if peers and all(wait.ranks for wait in waits) else busy


def _place(location: Location) -> str:
    return str(location._replace(step=None))


def _together(words: Mapping[int, str]) -> dict[str, list[int]]:
    together: dict[str, list[int]] = {}
    for rank, each in sorted(words.items()):
        together.setdefault(each, []).append(rank)
    return together


def _does(what: str, ranks: list[int]) -> str:
    """Return what ranks do, in words that come after "which"."""
    is_several = len(ranks) > 1
    if what.startswith(("in ", "at ")):
        return f"{'are' if is_several else 'is'} {what}"
    return of_several(what) if is_several else what


def _listed(parts: list[str]) -> str:
    more = len(parts) - _MOST_PLACES
    if more > 0:
        parts = [*parts[:_MOST_PLACES], f"{more} more"]
    return ", and ".join(parts)
