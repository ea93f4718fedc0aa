"""Members: the ranks of a run of which some may be lost and come back, as the strategy that allows it sees them.

Whoever asks for batches, averages gradients or exchanges values does so among those that are there at the moment.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from distwrap.errors import DistwrapError
from distwrap.group.world import current_world
from distwrap.wording import print_notice

P = ParamSpec("P")
R = TypeVar("R")
Element = TypeVar("Element")


class WorkLostError(DistwrapError, RuntimeError):
    """The rank was lost that did something for all, and the ranks are numbered anew: one of them is to do it again."""


def done_by_one(work: Callable[[], R]) -> R:
    """Call what one rank does for all, and again where that rank is lost in it."""
    while True:
        try:
            return work()
        except WorkLostError as error:
            print_notice(f"{error}")


class Members(ABC):
    """Ranks that are there, for this one."""

    @property
    @abstractmethod
    def arrangement(self) -> int:
        """Number that changes with the members, and with this rank's place among them."""

    @abstractmethod
    def begin_step(self, *, admit: bool) -> None:
        """Begin a step of the training with all that are there; a no-op where one is under way.

        Args:
            admit: whether ranks that come back may come in, at this place of the loop.
        """

    @abstractmethod
    def collective(self, what: str, call: Callable[[], R]) -> R:
        """Return the value of a collective, which is called again where a member was lost in it."""

    @abstractmethod
    def share(self, key: str, worker: int, result: bytes | None) -> bytes:
        """Return the result of a rank's work, which has a key of its own; see `distwrap.group.wait_for_rank`.

        Raises:
            WorkLostError: that rank was lost before it was done.
        """

    @abstractmethod
    def loop(self, elements: Iterable[Element], objects: tuple[Any, ...]) -> Iterator[Element]:
        """Yield the elements of a loop from where the others are; see `resumable`."""

    @abstractmethod
    def add_loader(self, loader: Any) -> int:
        """Take note of a loader, whose position ranks that come back are to take over, and return its number."""

    @abstractmethod
    def begin_pass(self, number: int) -> bool:
        """Begin to go through a loader; return whether the others are through already, and this rank is to skip it."""

    @abstractmethod
    def begin_batch(self, number: int) -> None:
        """Begin a step, if none is under way, before a loader gives a batch for it."""

    @abstractmethod
    def end_batches(self) -> None:
        """Be at the same step with all that are there, at the end of a pass."""

    @abstractmethod
    def end_pass(self, number: int, *, was_left: bool) -> None:
        """Take note that this rank is through a loader, or has left it in the middle."""

    @abstractmethod
    def conclude(self) -> None:
        """Wait, at the end of the function, until all members have reached it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the others."""


def resumable(elements: Iterable[Element], *objects: Any) -> Iterator[Element]:
    """Yield the elements of the outer loop; a rank that was lost and comes back continues where the others are.

    Without ``max_lost=``, and in a single process, these are simply all elements. With it, a rank that was lost is
    started again, and runs the function from its beginning to this loop. There it takes over from the others the
    wrapped models and optimizers, their schedulers, and the positions of sharded loaders, and skips the elements and
    the passes through loaders that are done. Collectives on the way return what they returned to the others.

    Args:
        elements: the elements of the loop, the same on all ranks, as ``range(epochs)``.
        *objects: more objects with ``state_dict`` and ``load_state_dict`` whose state such a rank takes over.

    Example:
        >>> for epoch in resumable(range(2)):
        ...     print(epoch)
        0
        1
    """
    members = current_world().members
    return iter(elements) if members is None else members.loop(elements, objects)


def among_members(function: Callable[P, R]) -> Callable[P, R]:
    """Let a collective go on among those that are left where a member is lost in it."""

    @functools.wraps(function)
    def _call(*args: P.args, **kwargs: P.kwargs) -> R:
        members = current_world().members
        if members is None:
            return function(*args, **kwargs)
        return members.collective(function.__name__, lambda: function(*args, **kwargs))

    return _call
