"""Stopwatch: divides the time of a rank's training thread among the parts of a step, without gaps or overlaps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import torch

from distwrap._internals.torch import current_backward
from distwrap.devices.kinds import kind_of

Item = TypeVar("Item")


class Part(IntEnum):
    """Parts of a step. A moment belongs to the part that was begun last and has not ended."""

    DATA = 0  # waiting for the next batch, and bringing it to the device
    FORWARD = 1  # of a wrapped model, with gradients
    BACKWARD = 2  # until this rank's own gradients are there
    EXCHANGE = 3  # waiting for the other ranks: the rest of the backward, and collectives
    OPTIMIZER = 4
    CHECKPOINT = 5
    EVALUATION = 6  # forwards and loaders with gradients off, and what is between them
    OWN = 7  # the loop's own code: the loss, metrics, printing


Row = list[float]  # seconds of each part
_MOST_MARKS = 4096  # that are kept as such


class Clock(Protocol):
    """Clock of a device: moments, and the seconds between two that were reached."""

    @property
    def now(self) -> Callable[[], Any]:
        """Function that returns the moment at which the device will have done what it was given."""

    def is_reached(self, moment: Any) -> bool:
        """Return whether the device has come to a moment."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two moments to which the device has come."""


class HostClock:
    """The CPU's clock."""

    now = staticmethod(time.perf_counter)

    def is_reached(self, moment: float) -> bool:
        return True

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


class DeviceClock:
    """Clock of an accelerator: events in its stream, so that a step is timed without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = kind_of(device).streams()

    def now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, moment: Any) -> bool:
        return bool(moment.query())

    def seconds(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1000


def clock_of(device: torch.device) -> Clock:
    """Return the clock on which the work of a device is timed: the host's where its events do not tell the time."""
    if kind_of(device).streams() is not None:
        clock = DeviceClock(device)
        with suppress(NotImplementedError, RuntimeError, TypeError):
            first, second = clock.now(), clock.now()
            kind_of(device).finish(device)
            clock.seconds(first, second)
            return clock
    return HostClock()


class Stopwatch:
    """Times of one thread's parts, a row for each step.

    Args:
        clock: of the device that computes.

    Attributes:
        on_step: called after each optimizer step that ends a step, or begins the first one.
        on_row: called with the row of each step, once the device has come to its end.
        on_part: called with a part as it begins, or goes on after one in it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._now, self._thread = clock, clock.now, threading.get_native_id()
        self._open = [Part.OWN]
        self._marks: list[tuple[Part, Any]] = []  # each part, and when it ended
        self._began = self._now()
        self._waiting: list[tuple[Any, list[tuple[Part, Any]], bool]] = []  # from when; marks; whether a step ends
        self._row: Row = [0.0] * len(Part)  # what of a step has become of marks already
        self.on_step: list[Callable[[], None]] = []
        self.on_row: list[Callable[[Row], None]] = []
        self.on_part: list[Callable[[Part], None]] = []

    def hears(self) -> bool:
        """Return whether the thread that calls is the timed one, or one in which its backward runs meanwhile."""
        # Python's own number of a thread is the same in a fork, as a loader's worker is one.
        if threading.get_native_id() == self._thread:
            return True
        return self.is_open(Part.BACKWARD) and current_backward() not in (None, -1)

    def begin(self, part: Part) -> None:
        """Begin a part, inside of the one that is open; what is between two of evaluation is evaluation too."""
        if self.is_in(Part.OPTIMIZER) and part not in (Part.OWN, Part.EXCHANGE):
            self.end(Part.OPTIMIZER)  # its step has raised, which torch tells nobody, and the loop goes on
        before = self._open[-1]
        if part is Part.EVALUATION and before is Part.OWN and self._marks and self._marks[-1][0] is part:
            before = part
        self._marks.append((before, self._now()))
        if len(self._marks) > _MOST_MARKS:  # a step may be as long as a program that never steps
            self._settle_marks(ends_step=False)
        self._open.append(part)
        for call in self.on_part:
            call(part)

    def end(self, part: Part) -> None:
        """End a part, and what was begun in it and has not ended, as after an exception."""
        if part not in self._open:
            return
        self._marks.append((self._open[-1], self._now()))
        while self._open.pop() is not part:
            pass
        for call in self.on_part:
            call(self._open[-1])

    def is_in(self, part: Part) -> bool:
        """Return whether a part is the innermost one."""
        return self._open[-1] is part

    def is_open(self, part: Part) -> bool:
        """Return whether a part has begun, and not ended."""
        return part in self._open

    def step(self) -> None:
        """End a step here."""
        self._marks.append((self._open[-1], self._now()))
        self._settle_marks(ends_step=True)
        for call in self.on_step:
            call()

    def begin_first(self) -> None:
        """Begin the first step here; what came before belongs to none."""
        self._began, self._marks = self._now(), []
        self._waiting, self._row = [], [0.0] * len(Part)
        for call in self.on_step:
            call()

    def settle(self) -> None:
        """Turn the steps to whose end the device has come into rows."""
        while self._waiting and self._clock.is_reached(self._waiting[0][1][-1][1]):
            earlier, marks, ends_step = self._waiting.pop(0)
            for part, later in marks:
                self._row[part] += self._clock.seconds(earlier, later)
                earlier = later
            if ends_step:
                row, self._row = self._row, [0.0] * len(Part)
                for call in self.on_row:
                    call(row)

    def _settle_marks(self, *, ends_step: bool) -> None:
        self._waiting.append((self._began, self._marks, ends_step))
        self._began, self._marks = self._marks[-1][1], []
        self.settle()

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Time what is inside a ``with`` as a part; in another thread nothing is."""
        if not self.hears():
            yield
            return
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    def timed(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, and time the wait for each as data or evaluation; in another thread nothing is timed."""
        if not self.hears():
            yield from items
            return
        source, nothing = iter(items), object()
        try:
            while True:
                part = Part.DATA if torch.is_grad_enabled() else Part.EVALUATION
                self.begin(part)
                try:
                    item = next(source, nothing)
                finally:
                    self.end(part)
                if item is nothing:
                    return
                yield item  # type: ignore[misc]
        finally:  # at once, also while another thread looks at this frame and keeps what it holds
            if isinstance(source, Generator):
                source.close()
