"""Figures that a rank shows while it runs, on the board of its node; `runs` reads them from another process."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from distwrap.devices.cpus import thread_times
from distwrap.devices.kinds import kind_of
from distwrap.environments import Placement
from distwrap.network import memory_file
from distwrap.supervision.activity import Activity
from distwrap.supervision.locations import Location
from distwrap.supervision.notes import RankNotes
from distwrap.supervision.shown import ANSWER, NAME, Shown

_WINDOW = 10.0  # seconds over which idleness and speed are measured
_LOOKS = 40  # in these
_TICK = 0.5  # seconds between two looks, at most where the machine is not overwhelmed


class Live:
    """This rank's figures, which the channel's thread collects and shows.

    Args:
        notes: the notes among which they are shown.
        placement: this rank's place.
        activity: the last helper that ran on this rank.

    Attributes:
        device: this rank's device.
    """

    def __init__(self, notes: RankNotes, placement: Placement, activity: Activity) -> None:
        self._notes, self._rank, self._activity = notes, placement.rank, activity
        self._busy: deque[tuple[float, float]] = deque(maxlen=_LOOKS)
        self._steps: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # how many there were, as more came
        self._of_loops: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._averages_before = 0
        self.device = torch.device("cpu")

    def look(self) -> None:
        """Note how long the main thread has computed, and how many steps it has made."""
        now = time.monotonic()
        # The main thread's number is the process's; Python's word for it is out of date in a fork.
        if (times := thread_times(os.getpid())) is not None:
            self._busy.append((now, sum(times)))
        if more := self._new_steps():
            self._steps.append((now, self._steps[-1][1] + more))
        while len(self._steps) > 2 and now - self._steps[1][0] > _WINDOW:
            self._steps.popleft()

    def _new_steps(self) -> int:
        """Return the number of steps since the last look: batches of the loop, or averages if these are more."""
        loop, step, averages = self._activity.loop, self._activity.step or 0, self._averages_begun()
        before, self._averages_before = self._averages_before, averages
        more = averages - before if averages >= before else averages  # they may be counted anew
        if loop is not None:
            before = self._of_loops.get(loop, 0)
            more = max(more, step - before if step >= before else step)
            self._of_loops[loop] = step
        return more

    def _averages_begun(self) -> int:
        return self._activity.averages()[1] // 2

    def show(self, location: Location | None) -> None:
        """Show this rank's figures to other processes.

        Args:
            location: where it is; ``None`` where it has left.
        """
        if memory_file.ARE_POSSIBLE:  # else nobody could find the board
            self._notes.show(NAME, asdict(self._figures(location)))

    def tell(self, text: str) -> None:
        """Show where all ranks are, in answer to another process."""
        self._notes.show(ANSWER, [time.time(), text])

    def _figures(self, location: Location | None) -> Shown:
        step = self._activity.step
        return Shown(
            rank=self._rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self.device),
            step=(self._averages_begun() or None) if step is None else step,
            speed=self._speed(time.monotonic()),
            idle=self._idle(),
            location=None if location is None else list(location),
            memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            device_memory=kind_of(self.device).peak_memory(self.device),
            bar=self._activity.bar(),
            time=time.time(),
        )

    def _speed(self, now: float) -> float:
        """Return the steps per second, measured up to the last step, or up to now if the next one is overdue."""
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        if last == first:
            return 0.0
        is_overdue = now - ended > _TICK + (ended - began) / (last - first)
        return (last - first) / ((now if is_overdue else ended) - began)

    def _idle(self) -> float | None:
        if len(self._busy) < 2:
            return None
        (began, before), (now, after) = self._busy[0], self._busy[-1]
        return min(1.0, max(0.0, 1 - (after - before) / (now - began)))
