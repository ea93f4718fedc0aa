"""The ranks that are there: steps that all of them take or none, collectives among them, and the way back to them.

A step begins with a quorum: those that are there make a group, and who is behind takes over the state of who is ahead.
It ends with a commit, or without one where an exchange failed, as when a rank dies in it. A collective in which a rank
dies is made again among those that are left; who has its result already gives it to the others.
"""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from distwrap._internals.torch_tree import map_tensors
from distwrap.errors import CollectiveError, ModelError
from distwrap.group import failures
from distwrap.group.members import Members
from distwrap.group.signing import sign, verify
from distwrap.group.world import World, say
from distwrap.model.wrapped_models import parameters_of
from distwrap.strategies.torchft.course import Course, LeftBehindError, Place
from distwrap.strategies.torchft.quorum import Quorum
from distwrap.strategies.torchft.records import StartRecords
from distwrap.strategies.torchft.rounds import WeightRounds
from distwrap.strategies.torchft.state import TrainingState
from distwrap.wording import first_line, named_ranks

R = TypeVar("R")
Element = TypeVar("Element")

_ATTEMPTS = 5  # at a group, in each of which another member may be lost
_MOST_REFUSED = 10  # steps in a row: more than deaths explain
_ALONE_SECONDS = 0.1  # between looks of a rank that has come back before those that have the state

_NOTHING = object()
_ROUND = "the mean of the weights"  # a collective of our own
WRAPPING = "wrap_model"  # for which a rank that comes back has no use


class TorchFTMembers(Members):
    """The members of a run under ``strategy="torchft"``.

    Args:
        world: of the run.
        lighthouse: torchft's, which knows who is there.
        store: of the launch, in which ranks tell their launcher how far they are.
        fewest: number of members without which no step is taken.
        come_back: whether lost ranks come back.

    Attributes:
        quorum: of those that are there.
        is_away: whether this rank has come back, and is not among the others yet.
    """

    def __init__(self, world: World, lighthouse: str, store: Store, *, fewest: int, come_back: bool = True) -> None:
        self._world, self._come_back = world, come_back
        self.quorum = Quorum(world, lighthouse, store, fewest, self._state_dict, self._load_state_dict)
        self._course, self._state = Course(), TrainingState()
        self._operations, self._last = 0, None  # collectives so far, and the result of the last one
        self._records = StartRecords(store, world.secret or b"")
        self._is_open = self._is_fresh = self._is_busy = False  # a step; a quorum; a collective
        self.is_away = self._takes_over = False
        self._loads = 0  # of others' states
        self._refused = 0  # steps in a row that were not taken
        self._verdict = self._has_committed = False
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    @property
    def number(self) -> int:
        """This rank's number in the launch, which it keeps."""
        return self.quorum.number

    @property
    def arrangement(self) -> int:
        return self.quorum.arrangement

    def arrive(self) -> None:
        """Come to the others: at the start of the run at once, later not before the loop.

        Raises:
            ArrivalError: not all ranks came.
        """
        if not self.quorum.has_begun():
            self.quorum.arrive()
            return
        self.is_away = True
        place = self._world.placement
        self._world.placement = replace(place, rank=place.world_size - 1)  # not the rank that prints and saves

    def _return(self) -> None:
        """Wait until the others let this rank in, and take over their state."""
        self.quorum.begin()
        self.is_away, self._takes_over = False, True
        while self._takes_over:
            self._meet(admit=True)
            time.sleep(_ALONE_SECONDS * self._takes_over)
        self.quorum.tell("there")

    # Meetings

    def _meet(self, *, admit: bool) -> None:
        """Meet the others at the same place."""
        while self._gather(admit=admit)[0]:
            pass  # a member is behind by a collective, and is yet to come here

    def _gather(self, *, admit: bool) -> tuple[bool, Any]:
        """Be in a group of all that are there.

        Returns:
            Whether a member was behind by a collective, and if it was this one the result of that.

        Raises:
            CollectiveError: no group came about.
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
            f"rank {self.number} on {socket.gethostname()}: no group of the ranks came about in {_ATTEMPTS} attempts, "
            f"the last of which failed: {first_line(error)}"
        )

    def _compared(self) -> tuple[bool, Any]:
        """Let all members of a new group be at the same collective, with the same weights; see `_gather`."""
        secret = self._world.secret or b""
        everyone: list[Any] = [None] * len(self.quorum.members)
        dist.all_gather_object(everyone, sign((self._operations, self._state.fingerprint()), secret))
        known = [verify(message, secret, rank) for rank, message in enumerate(everyone)]
        counts, marks = [count for count, _ in known], [mark for _, mark in known]
        if min(counts) < max(counts) - 1:
            raise ModelError(
                f"the ranks have made {counts} collectives, so they are at different places of the program. Every rank "
                f"must call the same collectives."
            )
        apart = [number for number, mark in zip(self.quorum.members, marks, strict=True) if mark != marks[0]]
        if apart:
            raise ModelError(
                f"the weights of {named_ranks(apart)} are not those of rank {self.quorum.members[0]} at step "
                f"{self.quorum.step}: they were changed by more than the steps of optimizers."
            )
        if min(counts) == max(counts):
            return False, _NOTHING
        holder = counts.index(max(counts))
        given = [sign(self._last, secret) if self._world.placement.rank == holder else b""]
        dist.broadcast_object_list(given, src=holder)
        if self._operations == max(counts):
            return True, _NOTHING
        self._operations, self._last = max(counts), verify(given[0], secret, holder)
        return True, self._last

    # Steps

    def begin_step(self, *, admit: bool) -> None:
        if self._is_open or self._is_busy or self._course.is_replaying:
            return
        if self._come_back and (not self._course.place.loop or self._course.is_over):
            raise ModelError(
                "with max_lost=, a rank that is started again must know where to come in: write the loop of the "
                "training as `for epoch in distwrap.resumable(range(epochs)):`, with the steps inside of it."
            )
        if not self._is_fresh:
            self._meet(admit=admit)
        self._is_open, self._is_fresh = True, False

    def begin_exchange(self) -> None:
        """Begin a step at the end of its backward, where no loader has begun it."""
        before = self._loads
        self.begin_step(admit=False)
        if self._loads != before:
            self.quorum.doom(RuntimeError("the gradients are of other weights"))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Let an optimizer of our models step where the step is committed; without gradients it changes nothing."""
        held = parameters_of(optimizer)
        models = {model for model in self._state.models if any(id(each) in held for each in model.parameters())}
        if not models:
            return
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):
            raise ModelError(
                f"{type(optimizer).__name__}.step(closure) does not go with max_lost=: its closure would average "
                f"gradients within the step."
            )
        if models <= self._state.rounds.keys():
            return  # each rank takes its own
        if self._is_open:  # else it is of the same step as another optimizer's
            self._commit()
        if not self._verdict:
            for parameter in held.values():
                parameter.grad = None

    def _commit(self) -> None:
        self._is_open = False
        error = self.quorum.error
        self._verdict = self.quorum.commit()
        self._refused = 0 if self._verdict else self._refused + 1
        if self._refused >= _MOST_REFUSED:
            raise CollectiveError(
                f"rank {self.number} on {socket.gethostname()}: {self._refused} steps in a row were not taken, as "
                f"their exchange failed: {first_line(error) if error is not None else 'on another rank'}"
            ) from error
        if self._verdict and not self._has_committed:
            self._has_committed = True
            self.quorum.tell("committed")

    def end_round(self, mean: Callable[[], torch.Tensor]) -> torch.Tensor:
        """End a round of steps that each member has taken on its own; return the mean of their weights."""
        self._is_open = False  # who is lost in the exchange dooms no step: the others exchange again
        found = self.collective(_ROUND, mean)
        self._commit()
        return found

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
        if self._course.is_over and what != _ROUND:
            self._end_rounds()  # which a break out of the loop has left
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

    def _after_loss(self, what: str, error: RuntimeError | None) -> Any:
        """Make a group of those that are left; return the result of the collective where they have it already."""
        before = set(self.quorum.members)
        if error is not None:
            self.quorum.fail(error)
        _, value = self._gather(admit=False)
        if self._is_open:
            self.quorum.doom(RuntimeError("a rank was lost in this step"))
        gone = before - set(self.quorum.members)
        if gone and what not in ("barrier", "agree", _ROUND, WRAPPING):
            say(f"{what}() goes on without {named_ranks(gone)}, and what would have come from there")
        return value

    def _note(self, what: str) -> None:
        """Keep the result of a collective for ranks that come back."""
        if what in (_ROUND, WRAPPING):
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

    # The loop and its loaders

    def loop(self, elements: Iterable[Element], objects: tuple[Any, ...]) -> Iterator[Element]:
        if objects:
            self._state.objects = objects
        self._state.things()  # refuses what could not be told apart later
        if not self._state.models:
            say("resumable() before wrap_model(): a rank that comes back takes over wrapped models alone")
        if self.is_away:
            self._return()
        first = self._course.begin_loop()
        if first is None:
            return
        for number, element in enumerate(elements):
            if number < first:
                continue
            replays = self._course.is_replaying
            self._course.begin_element(number, repr(element))
            if not replays:
                self._is_open = False  # a step that the loop has left
                self._meet(admit=True)
                self._is_fresh = True
            try:
                yield element
            except GeneratorExit:
                self._course.end_loop()
                raise
            self._end_rounds()
        self._course.end_loop()

    def _end_rounds(self) -> None:
        for rounds in self._state.rounds.values():
            rounds.end()

    def add_loader(self, loader: Any) -> int:
        self._state.add_loader(loader)
        return self._course.add_loader()

    def begin_pass(self, number: int) -> bool:
        return self._course.begin_pass(number)

    def end_pass(self, number: int) -> None:
        self._course.end_pass(number)

    def begin_batch(self, number: int) -> None:
        place = self._course.place
        before, place.at = place.at, number
        try:
            self.begin_step(admit=self._course.is_outermost(number))
        finally:
            place.at = before

    # State

    def add_model(self, model: nn.Module, rounds: WeightRounds | None = None) -> None:
        """Take note of a model that all ranks train, and of its rounds, where they exchange weights."""
        self._state.models.append(model)
        if rounds is not None:
            self._state.rounds[model] = rounds

    def _state_dict(self) -> dict[str, Any]:
        place = self._course.place
        return {
            **self._state.state_dict(),
            "place": replace(place, passes=list(place.passes)),
            "log": list(self._course.log),
            "operations": self._operations,
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a member that is ahead."""
        self._loads += 1
        place: Place = state["place"]
        if not self._takes_over and not self._course.is_at(place):
            raise LeftBehindError(
                f"rank {self.number} on {socket.gethostname()} was slow, and taken for lost; the others have gone on."
            )
        self._state.load_state_dict(state)
        if self._takes_over:
            self._course.take_over(place, state["log"])
            self._operations, self._takes_over = state["operations"], False
            self._is_open, self._is_fresh = place.at is not None, place.at is None

    # The end

    def conclude(self) -> None:
        if self.is_away:
            return
        self._end_rounds()
        while self.quorum.end():
            self._gather(admit=False)  # a member has failed in its last collective, and asks for the result

    def close(self) -> None:
        self._hook.remove()
        for rounds in self._state.rounds.values():
            rounds.close()
        self.quorum.close()


def _copied(result: Any) -> Any:
    """Return a copy that the loop cannot change; of tensors without their gradients."""
    return copy.deepcopy(map_tensors(lambda tensor: tensor.detach(), result))
