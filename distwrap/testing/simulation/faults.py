"""Faults on demand: at an event of a rank it dies, its collective fails, or it is late."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distwrap.testing.simulation.scheduler import Rank, Scheduler

# Takes a rank, the number of its event, from 1, and the event in words; returns "die", an exception that the event
# raises, a number of seconds by which the rank is late, or None.
FailAt = Callable[[int, int, str], Any]
Fail = tuple[int, int] | FailAt

_FILES = {
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.truncate": "truncate",
}
_watching: list[Scheduler] = []


@contextmanager
def watched(scheduler: Scheduler, fail: Fail | None) -> Iterator[None]:
    """Let events fail within a ``with``, and count operations on files as events too."""
    if fail is None:
        yield
        return
    if not callable(fail):
        rank_that_dies, at = fail
        fail = lambda rank, number, what: "die" if (rank, number) == (rank_that_dies, at) else None  # noqa: E731
    scheduler.fails = _failing(scheduler, fail)
    _hook_once()
    _watching.append(scheduler)
    try:
        yield
    finally:
        _watching.remove(scheduler)


def _failing(scheduler: Scheduler, fail: FailAt) -> Callable[[Rank, str], None]:
    def at_event(rank: Rank, what: str) -> None:
        how = fail(rank.number, rank.events, what)
        if how == "die":
            scheduler.kill()
        elif isinstance(how, BaseException):
            raise how
        elif how is not None:
            scheduler.sleep(float(how))

    return at_event


@functools.cache
def _hook_once() -> None:
    sys.addaudithook(_at_file)  # which cannot be taken away, and does nothing while nobody watches


def _at_file(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or (event != "open" and event not in _FILES):
        return
    scheduler = _watching[-1]
    reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if scheduler.current() is not None and isinstance(args[0], (str, bytes, os.PathLike)) and not reads:
        scheduler.event(f"{_FILES.get(event, event)}({os.fsdecode(args[0])!r})")
