"""The place of this rank in the program, and how a rank that comes back reaches the place of the others.

Nothing in this module waits for another rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from distwrap.errors import DistwrapError, LoaderError, ModelError


class LeftBehindError(DistwrapError, RuntimeError):
    """Rank that the others have left behind, in another element or pass; its launcher starts it again."""


@dataclass
class Place:
    """Place in the program, which is the same on all ranks at the start of a step.

    Attributes:
        loop: the number of the current resumable loop, from 1; 0 before the first.
        element: the index of its current element, from 0.
        words: a text for that element.
        passes: for each loader, how many passes the element has finished.
        at: the number of the loader that is about to give a batch; ``None`` at the start of the element.
    """

    loop: int = 0
    element: int = 0
    words: str = ""
    passes: list[int] = field(default_factory=list)
    at: int | None = None


class Course:
    """Place of this rank in the program, and its way there.

    Args:
        on_landing: called when this rank has reached the others after coming back.

    Attributes:
        place: the place of this rank.
        between: the results of collectives between loops.
        log: the results of collectives in this element, except those within passes through loaders.
        counts: the counters of the run at the start of the element, and after each loop.
        is_narrow: whether ranks may come back only between passes, after a collective within a pass or a pass that was
            left.
        is_over: whether the last loop has ended.
    """

    def __init__(self, on_landing: Callable[[], None] = lambda: None) -> None:
        self._on_landing = on_landing
        self.place = Place()
        self.between: list[Any] = []
        self.log: list[Any] = []
        self.counts: list[dict[str, int]] = [{}]
        self.is_narrow = False
        self.is_over = False
        self._begun: dict[int, tuple[int, int]] = {}  # running passes from the outermost on: their loop and element
        self._skips: list[int] = []  # passes to skip on a rank that has come back
        self._replay: deque[Any] | None = None  # results to return again until the others' place
        self._landing: Place | None = None

    @property
    def is_replaying(self) -> bool:
        """Whether this rank has come back, and has not reached the others yet."""
        return self._replay is not None

    def is_at(self, place: Place) -> bool:
        """Return whether this rank is at a place, whatever the step."""
        return replace(place, at=None) == replace(self.place, at=None)

    @property
    def is_outside(self) -> bool:
        """Whether no loop is running."""
        return not self.place.loop or self.is_over

    def admits(self, loader: int) -> bool:
        """Return whether a rank that comes back before a batch of this loader would be where the others are.

        It runs the element from the start. It would miss the outer batch of a nested pass, or the batches of a pass
        that began in an earlier element, and would count batches differently.
        """
        here = (self.place.loop, self.place.element)
        return not self.is_narrow and list(self._begun)[:1] == [loader] and self._begun[loader] == here

    def add_loader(self) -> int:
        """Return a number for a loader.

        Raises:
            LoaderError: a loop has already begun.
        """
        if self.place.loop:
            raise LoaderError(
                "shard_loader() inside of a resumable() loop: a rank that comes back would number its loaders "
                "differently from the others. Make the loaders before the loop."
            )
        self.place.passes.append(0)
        return len(self.place.passes) - 1

    def take_over(self, place: Place, between: list[Any], log: list[Any]) -> None:
        """Start the way to the others' place, on a rank that comes back.

        Raises:
            LoaderError: the others have a different number of loaders.
        """
        if len(place.passes) != len(self.place.passes):
            raise LoaderError(
                f"this rank has come back with {len(self.place.passes)} sharded loaders, and the others have "
                f"{len(place.passes)}: make the same loaders each time the function begins."
            )
        self._landing, self._skips, self._replay = place, list(place.passes), deque([*between, *log])
        self.between = list(between)

    def begin_loop(self) -> int | None:
        """Begin the next resumable loop, and return its first element for this rank; ``None`` if it is done.

        Raises:
            ModelError: it is inside of another loop.
        """
        if self.place.loop and not self.is_over:
            raise ModelError("resumable() inside of a resumable() loop: use it for the outer loop only.")
        self.place.loop += 1
        self.is_over = False
        if self._landing is None:
            return 0
        if self._landing.loop > self.place.loop:
            self.is_over = True
            return None
        return self._landing.element

    def begin_element(self, number: int, words: str = "") -> None:
        """Begin an element of the loop.

        Raises:
            ModelError: the others have another element.
        """
        if self._landing is not None and self._landing.words != words:
            raise ModelError(
                f"this rank has come back, and the {number + 1}-th element of its resumable() is {words}, "
                f"where the others have {self._landing.words}: give resumable() the same elements each time "
                "the function begins, as range(epochs), and not only those that remain after a newer checkpoint."
            )
        self.place.element, self.place.words, self.place.at = number, words, None
        self.place.passes = [0] * len(self.place.passes)
        self.log = []
        if self._landing is not None and self._landing.at is None:
            self._land()
        elif self._replay is not None:
            self.log = list(self._replay)

    def end_loop(self) -> None:
        """Note that the loop has ended."""
        self.is_over = True

    def begin_pass(self, loader: int) -> bool:
        """Begin a pass through a loader, and return whether to skip it."""
        if self.is_replaying and self._skips[loader]:
            self._skips[loader] -= 1
            self.place.passes[loader] += 1
            return True
        self._begun[loader] = (self.place.loop, self.place.element)
        if self._landing is not None and self._landing.at == loader:
            self._land()
        return False

    def end_pass(self, loader: int, *, was_left: bool = False) -> None:
        """Note that a pass has ended, or was left."""
        if loader in self._begun:
            del self._begun[loader]
            self.place.passes[loader] += 1
            self.is_narrow = self.is_narrow or was_left

    def note(self, result: Any) -> None:
        """Keep the result of a collective for ranks that come back."""
        if self._begun and not self.is_outside:
            self.is_narrow = True
        elif self.is_outside:
            if self.place.loop:
                self.between.append(result)
        else:
            self.log.append(result)

    def replayed(self, what: str) -> Any:
        """Return the result that the others got from a collective.

        Raises:
            ModelError: they did not make this collective.
        """
        if not self._replay:
            raise ModelError(
                f"this rank has come back, and called {what}() where the others did not: the code before the "
                "step must make the same calls each time the function, or an element of the loop, begins."
            )
        return self._replay.popleft()

    def _land(self) -> None:
        assert self._replay is not None
        if self._replay:
            raise ModelError(
                f"this rank has come back, and has reached the others, but they called {len(self._replay)} "
                "more collectives to get there: the code before the step must make the same calls each time."
            )
        self._landing, self._replay = None, None
        self._on_landing()
