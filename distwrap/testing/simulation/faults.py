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

_FILES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_watching: list[Scheduler] = []


@contextmanager
def watched(scheduler: Scheduler, fail: Fail | None) -> Iterator[None]:
    """Let events fail within a ``with``, and count operations on files as events too."""
    if fail is None:
        yield
        return

    def at_event(rank: Rank, what: str) -> None:
        at = rank.number, rank.events
        how = fail(*at, what) if callable(fail) else "die" if at == fail else None
        if how == "die":
            scheduler.kill()
        elif isinstance(how, BaseException):
            raise how
        elif how is not None:
            scheduler.sleep(float(how))

    scheduler.fails = at_event
    _hook_once()
    _watching.append(scheduler)
    try:
        yield
    finally:
        _watching.remove(scheduler)


@functools.cache
def _hook_once() -> None:
    sys.addaudithook(_at_file)  # which cannot be taken away, and does nothing while nobody watches


def _at_file(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event not in _FILES:
        return
    reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if _watching[-1].current() is not None and isinstance(args[0], (str, bytes, os.PathLike)) and not reads:
        _watching[-1].event(f"{event.removeprefix('os.')}({os.fsdecode(args[0])!r})")
