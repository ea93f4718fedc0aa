"""Last activity of a rank: the helper that its user's code called, and the loader through which its loop goes."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from distwrap._internals.torch import collectives_begun
from distwrap._internals.torch_data import batches_given
from distwrap.frames import OURS
from distwrap.places import place
from distwrap.stopwatch import Item, Part, Stopwatch

_LATEST = 7  # collectives before the last one that are remembered


# How a rank waits: in an exchange; for the work of one rank; perhaps, as in a call on an accelerator, which is a wait
# if other ranks are behind; or in a debugger, in which a person takes their time.
Kind = Literal["exchange", "work", "perhaps", "debugger"]


class Waiting:
    """Token of a wait for other ranks, which lasts as long as the object is there."""

    def __init__(self, kind: Kind, peers: tuple[int, ...]) -> None:
        self.kind, self.peers = kind, peers


def _no_averages() -> tuple[int, int]:
    return 0, 0


class Activity:
    """Last helper that the user's code called, the place of the call, and the progress of its loader.

    Attributes:
        helper: the name of the helper, or empty.
        site: the file and line of the call.
        collectives: the number of distwrap's collectives that this rank has begun, in which all ranks take part.
        latest: the names and places of the latest of them, by their numbers.
        turns: the number of turns that it has begun in loops which all ranks go through together, including the last
            one, in which it tells the others that it has left.
        averages: a function that returns two numbers: how often the count of averages of gradients was started anew,
            and twice the number of averages begun since. The second one is odd during another exchange of the models
            between two averages.
        wait_begun: the innermost wait for other ranks in which this one says that it is.
        stopwatch: the stopwatch of a run that reports where its time goes.
        for_itself: the number of torch's collectives that distwrap has begun in calls that exchange no number of the
            user's, as in `wrap_model`.
    """

    def __init__(self, world: object) -> None:
        self.helper = ""
        self.site = ""
        self.collectives = self.turns = self.for_itself = 0
        self.latest: dict[int, tuple[str, str]] = {}
        self.averages: Callable[[], tuple[int, int]] = _no_averages
        self._loops: list[weakref.ref[Any]] = []  # that are under way, the innermost last
        self.wait_begun: Waiting | None = None
        self.stopwatch: Stopwatch | None = None

    def record(self, helper: str) -> None:
        """Note that a helper runs, and who called it."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        self.helper = helper
        self.site = place(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""

    def begin_collective(self, what: str) -> None:
        """Note that one of distwrap's collectives begins."""
        self.record(what)
        self.collectives += 1
        self.latest = {**dict(list(self.latest.items())[-_LATEST:]), self.collectives: (what, self.site)}

    def begin_anew(self) -> None:
        """Count from zero again all that this rank has begun."""
        self.averages, self.collectives, self.turns, self.latest = _no_averages, 0, 0, {}

    def begun(self) -> tuple[int, int, int, int]:
        """Return what this rank has begun: eras, averages, collectives, turns."""
        return (*self.averages(), self.collectives, self.turns)

    @contextmanager
    def exchanging_nothing(self) -> Iterator[None]:
        """Count torch's collectives within a ``with`` as those in which no number of the user's is exchanged."""
        before = collectives_begun() or 0
        try:
            yield
        finally:
            self.for_itself += (collectives_begun() or 0) - before

    def exchanged(self) -> int | None:
        """Return how many exchanges of numbers this rank has begun; ``None`` where the backend does not count."""
        begun = collectives_begun()
        return None if begun is None else begun - self.for_itself

    def follow(self, batches: Iterable[Any]) -> None:
        """Remember a loader's iterator, to read the step from it when asked: counting would cost each step."""
        self._loops = [each for each in self._loops if each() is not None and each() is not batches]
        self._loops.append(weakref.ref(batches))

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Return the batches; in a run that measures its time, the time to fetch each one is counted."""
        return batches if self.stopwatch is None else self.stopwatch.timed(batches)

    def part(self, part: Part) -> AbstractContextManager[None]:
        """Count the time within a ``with`` as one part of the loop's time, in a run that measures it."""
        return nullcontext() if self.stopwatch is None else self.stopwatch.part(part)

    @contextmanager
    def waiting(self, kind: Kind = "exchange", peers: tuple[int, ...] = (), *, timed: bool = True) -> Iterator[None]:
        """Say that this rank waits for others within a ``with``; a report counts its time as an exchange.

        Args:
            kind: how it waits.
            peers: the only ranks that it may wait for; empty if it may be any.
            timed: whether the time counts, which in a checkpoint counts as the checkpoint.
        """
        is_checkpoint = self.stopwatch is not None and self.stopwatch.is_open(Part.CHECKPOINT)
        before, self.wait_begun = self.wait_begun, Waiting(kind, peers)
        try:
            with self.part(Part.EXCHANGE) if timed and not is_checkpoint else nullcontext():
                yield
        finally:
            self.wait_begun = before

    @property
    def step(self) -> int | None:
        """Number of batches that the innermost loader under way has given; ``None`` if it is unknown."""
        batches = next((batches for each in reversed(self._loops) if (batches := each()) is not None), None)
        step = getattr(batches, "step", None)  # of a lockstep loop
        return step if isinstance(step, int) else batches_given(batches)

    def wait(self) -> None: ...

    def conclude(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...

    def __str__(self) -> str:
        return f"{self.helper} at {self.site}" if self.helper else ""
