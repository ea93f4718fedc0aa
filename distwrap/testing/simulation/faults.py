"""Faults on demand: at an event of a rank it dies, its collective fails, or it is late."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from distwrap import simulated
from distwrap.testing.simulation.scheduler import Rank, Scheduler

# Takes a rank, the number of its event, from 1, and the event in words; returns "die", an exception that the event
# raises, a number of seconds by which the rank is late, or None.
FailAt = Callable[[int, int, str], Any]
Fail = tuple[int, int] | FailAt

_FILES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def let_fail(scheduler: Scheduler, fail: Fail) -> None:
    """Let events of a simulation fail, and count its operations on files as events too."""

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


@functools.cache
def _hook_once() -> None:
    sys.addaudithook(_at_file)  # which cannot be taken away, and does nothing where nothing is to fail


def _at_file(event: str, args: tuple[Any, ...]) -> None:
    if event not in _FILES or simulated.running is None:
        return
    simulation: Any = simulated.simulation()
    reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if simulation and simulation.scheduler.fails and isinstance(args[0], (str, bytes, os.PathLike)) and not reads:
        simulation.scheduler.event(f"{event.removeprefix('os.')}({os.fsdecode(args[0])!r})")
