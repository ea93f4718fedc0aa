"""Meetings of all ranks in a save: they begin it together, and each learns of the first problem of any of them.

A rank that will not come is an error on those that wait, before a collective of the save could pair with one of the
training step. The ranks are counted in their store, and who waits asks one other rank where it is.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

from distwrap._internals.torch import collectives_begun, default_store
from distwrap.errors import CheckpointError, CollectiveError
from distwrap.group.collectives import gather_object
from distwrap.group.failures import is_secondary
from distwrap.group.wait_for_rank import USERS_GROUP_SECONDS, share_result
from distwrap.group.world import RunPart, World, current_world
from distwrap.network.keys import count, find
from distwrap.network.waiting import pause_between_looks, wait_until
from distwrap.supervision.activity import Activity
from distwrap.supervision.waits import Wait, read_wait
from distwrap.wording import print_notice

UNTOUCHED = ". What was there before is untouched."
ALONE = (
    "All ranks call save() together. If one rank alone is to write this, say save(…, alone=True); else let every rank "
    "call save(), without a condition such as 'if rank() == 0'."
)
TOGETHER = (
    "All ranks together save what a strategy divides, a folder of parts, and run_state(): let every rank call save(), "
    "without a condition such as 'if rank() == 0'."
)
ASK_SECONDS = 0.5  # until a rank that waits asks another one where it is; after some seconds each time twice as many
_LONGEST = 8.0
STUCK_SECONDS = 4.0  # for which all missing ranks must have waited for others, in which nothing is on its way any more
_AHEAD_SECONDS = 1.0  # likewise, where one of them has begun more exchanges than this rank


class SaveMeetings(RunPart):
    """Saves of this rank, and agreements in them, of which each rank has made as many."""

    def __init__(self, world: World) -> None:
        self._world, self._met, self._agreed = world, 0, 0
        self._ranks, self._rank = world.placement.world_size, world.placement.rank

    def meet(self, what: str, way_out: str = ALONE) -> str:
        """Wait until all ranks are in a save; return how this rank's differs from that of rank 0, if it does.

        Args:
            what: what this rank does.
            way_out: what to do where not all ranks come.

        Raises:
            CheckpointError: a rank will not come: it has left, has gone on, or waits for this one.
            WorkerDiedError: another rank died.
        """
        if self._ranks == 1:
            return ""
        activity = self._world.part(Activity)
        activity.record(what)
        mine, store = [what, *activity.begun()], self._store()
        if store is None:
            return self._difference(mine, gather_object(mine)[0])
        self._count(1)
        if self._rank == 0:
            store.set("distwrap/save", json.dumps(mine))
        store.add("distwrap/saves", 1)
        try:
            neighbour = (self._rank + 1) % self._ranks
            self._wait_for_all("saves", self._met * self._ranks, what, way_out, cycle([neighbour]))
        except BaseException:  # no rank makes this save
            store.add("distwrap/saves", -1)
            self._count(-1)
            raise
        return self._difference(mine, json.loads(find(store, "distwrap/save") or b"[]"))

    def agree(self, what: str, problem: tuple[str, bool], told: str = "") -> tuple[str, bool, str]:
        """Return the first problem of any rank, on every rank, whether it follows from another, and what rank 0 tells.

        Args:
            what: what this rank does.
            problem: of this rank; empty if there is none.
            told: on rank 0, a text for all.
        """
        if self._ranks == 1:
            return (*problem, told)
        store = self._store()
        if store is None:
            found = gather_object((*problem, told))
            return (*_first([each[:2] for each in found]), found[0][2])
        self._agreed += 1
        keys = [f"distwrap/save problem/{self._agreed}/{follows:d}" for follows in (False, True)]
        if self._rank:
            if problem[0]:
                store.compare_set(keys[problem[1]], "", problem[0])
            store.add("distwrap/save agreements", 1)
        else:
            others = self._agreed * (self._ranks - 1)
            self._wait_for_all("save agreements", others, what, ALONE, cycle(range(1, self._ranks)))
            theirs = [((find(store, key) or b"").decode(), bool(follows)) for follows, key in enumerate(keys)]
            problem = _first([problem, *theirs])
        verdict = None if self._rank else json.dumps([*problem, told]).encode()
        first, follows, told = json.loads(share_result(what, 0, verdict, turn="save"))
        return first, follows, told

    def hear(self, what: str, problem: tuple[str, bool]) -> tuple[str, bool]:
        """Return the problem of rank 0, which alone has worked, on every rank."""
        verdict = None if self._rank else json.dumps(problem).encode()
        first, follows = json.loads(share_result(what, 0, verdict, turn="save"))
        return first, follows

    def _store(self) -> Any:
        return default_store() if self._world.channel is None else self._world.store

    def _count(self, more: int) -> None:
        self._met += more
        if self._world.channel is not None:
            self._world.channel.note("saves", str(self._met))

    def _difference(self, mine: list[Any], zeros: list[Any]) -> str:
        """Return how the save of rank 0 is another one than this rank's: of another name, or of another moment."""
        if mine == zeros:
            return ""
        if mine[:1] == zeros[:1]:
            return (
                f"ranks 0 and {self._rank} are in different saves of this name, with other calls or steps before them "
                f"({mine[1:]} on rank {self._rank}, {zeros[1:]} on rank 0). {ALONE.rstrip('.')}"
            )
        return (
            f"rank {self._rank} called {mine[0]!r}, and rank 0 {zeros[0]!r}. Rank 0 writes for all ranks, so all must "
            "give the same name. For a file of each rank's own say save(…, alone=True)"
        )

    def _wait_for_all(self, key: str, target: int, what: str, way_out: str, asked: Iterator[int]) -> None:
        """Wait as long as it takes, while the others can come."""
        with self._world.part(Activity).waiting("work", (0,) if self._rank else (), timed=False):
            self._wait(key, target, what, way_out, asked)

    def _wait(self, key: str, target: int, what: str, way_out: str, asked: Iterator[int]) -> None:
        store, pause, patience, waited = self._store(), pause_between_looks(self._ranks), ASK_SECONDS, 0.0
        while not wait_until(lambda: count(store, f"distwrap/{key}") >= target, patience, pause):
            waited += patience
            if self._world.channel is not None:
                self._check(next(asked), what, way_out)
            elif waited > USERS_GROUP_SECONDS:
                raise CheckpointError(f"rank {self._rank} is in {what}, and not all ranks came. {way_out}")
            elif waited == ASK_SECONDS:
                print_notice(f"rank {self._rank} waits for the others in {what}. {way_out}")
            patience = ASK_SECONDS if waited < _LONGEST else min(2 * patience, _LONGEST)

    def _check(self, rank: int, what: str, way_out: str) -> None:
        """Raise if another rank has not come, and will not; one that computes may still come."""
        activity = self._world.part(Activity)
        why, wait, ahead = self._position(rank, what, way_out)
        if self._is_here(rank):
            return
        if not ahead and wait is None:
            return
        if not ahead and not (wait is not None and wait.kind == "work" and any(map(self._is_here, wait.peers))):
            missing = [other for other in range(self._ranks) if not self._is_here(other)]
            found = (self._position(other, what, way_out)[1] for other in missing)
            if not all(each is not None and each.seconds > STUCK_SECONDS for each in found):
                return
        activity.record(what)
        raise self._will_not_come(rank, why, what, way_out)

    def _position(self, rank: int, what: str, way_out: str) -> tuple[str, Wait | None, bool]:
        """Return in words where a rank is, the wait in which it is, and whether it has gone on past this save."""
        channel, activity = self._world.channel, self._world.part(Activity)
        assert channel is not None
        try:
            where, wait, begun, exchanges = json.loads(channel.work.ask(f"position/{rank}", rank))
        except CollectiveError as error:
            raise self._will_not_come(rank, "has left the function", what, way_out) from error
        mine, found = activity.begun(), read_wait(wait)
        ahead = any(theirs > own for theirs, own in zip((begun[:2], *begun[2:]), ([*mine[:2]], *mine[2:]), strict=True))
        more = exchanges > (collectives_begun() or 0)
        if found is not None and (found.kind == "debugger" or (found.kind == "perhaps" and not more)):
            found = None
        if found is not None and more and found.seconds > _AHEAD_SECONDS:
            found = found._replace(seconds=found.seconds + STUCK_SECONDS)
        return f"is {where}", found, ahead

    def _is_here(self, rank: int) -> bool:
        channel = self._world.channel
        assert channel is not None
        return rank >= 0 and int(channel.noted("saves", rank) or 0) >= self._met

    def _will_not_come(self, rank: int, why: str, what: str, way_out: str) -> CheckpointError:
        where = f"rank {self._rank} is in {what}, to which rank {rank} does not come"
        return CheckpointError(f"{where}: rank {rank} {why}. {way_out}")


def first_problem(own: BaseException | None, gather: Callable[[str], list[str]]) -> CheckpointError | None:
    """Return the failure of some rank on every rank; secondary failures come last.

    Args:
        own: the failure of this rank, or ``None``.
        gather: returns the texts of all ranks.
    """
    line = "" if own is None else f"{is_secondary(own):d}{_here()}: {problem_in_words(own)}"
    first, follows = _first([(text[1:], text[0] == "1") for text in gather(line) if text])
    return failure(first, follows) if first else None


def problem_of(error: BaseException | None, what: str, *, is_written: bool) -> tuple[str, bool]:
    """Return a failure of this rank in words for all ranks, and whether it follows from another."""
    if error is None:
        return "", False
    if is_written:
        told = f"{what} is written, but then {_here()} failed: {problem_in_words(error)}. The new one has its name."
    else:
        told = f"{what} was not written by {_here()}: {problem_in_words(error)}{UNTOUCHED}"
    return told, is_secondary(error)


def problem_in_words(error: BaseException) -> str:
    """Return a failure as a part of the message that tells where it was."""
    words = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return words.removesuffix(UNTOUCHED)


def failure(words: str, follows: bool) -> CheckpointError:
    """Return an error with words that all ranks have; `follows` says whether it follows from another failure."""
    return CheckpointError(words, secondary=follows)


def _first(problems: list[tuple[str, bool]]) -> tuple[str, bool]:
    """Return the first problem; those that follow from others come last."""
    return min((each for each in problems if each[0]), key=lambda each: each[1], default=("", False))


def _here() -> str:
    return f"rank {current_world().placement.rank} on {socket.gethostname()}"
