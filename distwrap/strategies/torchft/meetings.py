"""Meetings of the present ranks: a group of all of them at one place of the program, and its collectives.

A collective in which a rank dies is repeated by the remaining ranks; a rank that has the result sends it to them.
"""

from __future__ import annotations

import copy
import math
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap._internals.torch_tree import map_tensors
from distwrap.errors import CollectiveError, ModelError
from distwrap.group import failures
from distwrap.group.collectives import gather_object
from distwrap.group.members import Members, WorkLostError
from distwrap.group.signing import sign, verify
from distwrap.group.world import World, say
from distwrap.network.waiting import wait_until
from distwrap.strategies.torchft.course import Course
from distwrap.strategies.torchft.quorum import Quorum
from distwrap.strategies.torchft.records import StartRecords
from distwrap.strategies.torchft.state import TrainingState
from distwrap.wording import first_line, first_names, named_ranks

R = TypeVar("R")

_ATTEMPTS = 5  # attempts to form a group; each may lose another member
ALONE_SECONDS = 0.1  # pause of a returned rank until one with the state is there

_NOTHING = object()
ROUND, _MARKS = "the mean of the weights", "the comparison of weights"  # distwrap's own collectives
WRAPPING = "wrap_model"  # a rank that comes back does not need its result


class Meetings(Members):
    """Collective work of the members of a run outside of steps.

    Args:
        world: the world of the run.
        lighthouse: the address of torchft's lighthouse, which knows the present ranks.
        store: the store of the launch, in which ranks report their progress to the launcher.
        fewest: the number of members below which no step is taken.

    Attributes:
        quorum: the quorum of the present ranks.
        is_away: whether this rank has come back, and has not joined the others yet.
    """

    def __init__(self, world: World, lighthouse: str, store: Store, fewest: int) -> None:
        self._world, self._fewest = world, fewest
        self.quorum = Quorum(world, lighthouse, store, fewest, self._state_dict, self._load_state_dict)
        self._course, self._state = Course(self._landed), TrainingState()
        self._taken: dict[str, Any] | None = None  # the others' state, until this rank has reached them
        self._operations, self._last = 0, None  # collectives so far, and the result of the last one
        self._records = StartRecords(store, world.secret or b"")
        self._is_open = self._is_fresh = self._is_busy = False  # of a step; of a quorum; in a collective
        self.is_away = False

    @property
    def number(self) -> int:
        """This rank's number in the launch, which never changes."""
        return self.quorum.number

    @property
    def arrangement(self) -> int:
        return self.quorum.arrangement

    @abstractmethod
    def _state_dict(self) -> dict[str, Any]:
        """Return the state for a member that is behind."""

    @abstractmethod
    def _load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a member that is ahead."""

    @abstractmethod
    def _landed(self) -> None:
        """Join the others, on a rank that has come back."""

    @abstractmethod
    def _after_break(self) -> None:
        """Reach the same step as the others after a break has left the loop."""

    def _meet(self, *, admit: bool) -> None:
        """Meet the others at the same place."""
        # Repeated if a member is one collective behind, and has still to come here, or if too few members are there.
        while self._gather(admit=admit)[0] or (admit and len(self.quorum.members) < self._fewest):
            time.sleep(ALONE_SECONDS)

    def _gather(self, *, admit: bool) -> tuple[bool, Any]:
        """Form a group of all present ranks.

        Returns:
            Whether a member was one collective behind, and on that member the collective's result.

        Raises:
            CollectiveError: no group could be formed.
        """
        error: Exception | None = None
        for _ in range(_ATTEMPTS):
            before = self.arrangement
            error = self.quorum.find(admit=admit)
            if error is None and self.arrangement == before:
                return False, _NOTHING
            if error is None:
                try:
                    with self._busy():
                        return self._compared()
                except RuntimeError as lost:
                    if not failures.is_of_lost_peer(lost):
                        raise
                    error = lost
            self.quorum.fail(error)
        assert error is not None
        raise CollectiveError(
            f"rank {self.number} on {socket.gethostname()}: the ranks could not form a group in {_ATTEMPTS} "
            f"attempts, the last of which failed: {first_line(error)}"
        )

    def _compared(self) -> tuple[bool, Any]:
        """Bring all members of a new group to the same collective, and compare weights; see `_gather`."""
        secret = self._world.secret or b""
        everyone: list[Any] = [None] * len(self.quorum.members)
        dist.all_gather_object(everyone, sign((self._operations, self._mark()), secret))
        known = [verify(message, secret, rank) for rank, message in enumerate(everyone)]
        counts, marks = [count for count, _ in known], [mark for _, mark in known]
        if min(counts) < max(counts) - 1:
            raise ModelError(
                f"the ranks have called different numbers of collectives ({first_names(counts, 8)}), so they "
                "are at different places of the program. Every rank "
                f"must call the same collectives."
            )
        self._refuse_apart(marks)
        if min(counts) == max(counts):
            return False, _NOTHING
        holder = counts.index(max(counts))
        given = [sign(self._last, secret) if self._world.placement.rank == holder else b""]
        dist.broadcast_object_list(given, src=holder)
        if self._operations == max(counts):
            return True, _NOTHING
        self._operations, self._last = max(counts), verify(given[0], secret, holder)
        return True, self._last

    def _mark(self) -> int | None:
        """Return a number that is equal on all members with equal state; ``None`` on the way back."""
        return self._state.fingerprint() if self._taken is None else None

    def _refuse_apart(self, marks: list[int | None]) -> None:
        known = {number: mark for number, mark in zip(self.quorum.members, marks, strict=True) if mark is not None}
        first = min(known)
        apart = [number for number, mark in known.items() if mark != known[first]]
        if apart:
            raise ModelError(
                f"weights or learning rates of {named_ranks(apart)} are not those of rank {first} at step "
                f"{self.quorum.step}: they depend on something that a rank which came back did not take over, "
                "such as a counter in the loop, or one rank changed them by hand."
            )

    def _compare(self) -> None:
        marks: list[Any] = self.collective(_MARKS, lambda: gather_object(self._mark()))
        if len(marks) == len(self.quorum.members):  # else a member was lost afterwards
            self._refuse_apart(marks)
        self._is_fresh = not self._is_open

    # Collectives

    def collective(self, what: str, call: Callable[[], R]) -> R:
        if self._is_busy:
            return call()
        result: R
        if self.is_away:
            result = self._records.next(what)
            return result
        if self._course.is_replaying:
            result = self._course.replayed(what)
            return result
        self._is_fresh = False
        if what not in (ROUND, _MARKS):
            self._after_break()
        while True:
            error: RuntimeError | None = None
            try:
                if self.quorum.has_group:
                    with self._busy():
                        result = call()
                    self._operations += 1
                    self._last = _copied(result)
                    break
            except RuntimeError as lost:
                if not failures.is_of_lost_peer(lost):
                    raise
                error = lost
            value = self._after_loss(what, error)
            if value is not _NOTHING:
                result = value
                break
        self._note(what)
        return result

    def share(self, key: str, worker: int, result: bytes | None) -> bytes:
        store, name = self.quorum.store, f"work/{key}"
        if result is not None:
            store.set(name, result.hex())
            return result
        if store.check([name]):
            return bytes.fromhex(store.get(name).decode())
        if self.is_away or self._course.is_replaying:
            raise ModelError(
                f"this rank has come back, and waits for {key!r} where the others did not: the code before the "
                "step must make the same calls each time the function, or an element of the loop, begins."
            )
        number = self.quorum.members[worker]
        wait_until(lambda: store.check([name]) or store.check([f"gone/{number}"]), math.inf)
        if store.check([name]):
            return bytes.fromhex(store.get(name).decode())
        self._gather(admit=False)
        raise WorkLostError(f"rank {number} was lost in {key!r}, and another rank does that in its place")

    def _after_loss(self, what: str, error: RuntimeError | None) -> Any:
        """Form a group of the remaining ranks, and return the collective's result if one of them has it."""
        before = set(self.quorum.members)
        if error is not None:
            self.quorum.fail(error)
        _, value = self._gather(admit=False)
        if self._is_open:
            self.quorum.doom(RuntimeError("a rank was lost in this step"))
        gone = before - set(self.quorum.members)
        if gone and what not in ("barrier", "agree", ROUND, _MARKS, WRAPPING):
            say(f"{what}() goes on without {named_ranks(gone)} and their values")
        return value

    def _note(self, what: str) -> None:
        """Keep the result of a collective for ranks that come back."""
        if what in (ROUND, _MARKS, WRAPPING):
            return
        self._course.note(self._last)
        if not self._course.place.loop:
            self._records.keep(what, self._last, writes=self._world.placement.rank == 0)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before


def _copied(result: Any) -> Any:
    """Return a copy that the loop cannot change, with detached tensors."""
    return copy.deepcopy(map_tensors(lambda tensor: tensor.detach(), result))
