"""The present ranks of a run: steps that all or none of them take, the loop, and how a lost rank returns to it.

A step begins with a quorum: the present ranks form a group, and those behind take over the state of one ahead. It ends
with a commit, or without one if an exchange failed, as when a rank dies in it.
"""

from __future__ import annotations

import copy
import gc
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from distwrap.errors import CollectiveError, ModelError
from distwrap.group.world import World, say
from distwrap.model.wrapped_models import parameters_of
from distwrap.strategies.torchft.course import LeftBehindError, Place
from distwrap.strategies.torchft.meetings import ALONE_SECONDS, ROUND, Meetings
from distwrap.strategies.torchft.rounds import WeightRounds
from distwrap.wording import first_line

Element = TypeVar("Element")

_MOST_REFUSED = 10  # more steps in a row than deaths explain


class TorchFTMembers(Meetings):
    """Members of a run under ``strategy="torchft"``.

    Args:
        world: the world of the run.
        lighthouse: the address of torchft's lighthouse, which knows the present ranks.
        store: the store of the launch, in which ranks report their progress to the launcher.
        fewest: the number of members below which no step is taken.
        come_back: whether lost ranks come back.
    """

    def __init__(self, world: World, lighthouse: str, store: Store, *, fewest: int, come_back: bool = True) -> None:
        super().__init__(world, lighthouse, store, fewest)
        self._come_back, self._takes_over = come_back, False
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies from before the step, which may be undone
        self._loads = 0  # number of loaded states
        self._refused = 0  # steps in a row that were not taken
        self._verdict = self._has_committed = self._has_left = False
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def arrive(self) -> None:
        """Join the others: at once at the start of the run, later only before the loop.

        Raises:
            ArrivalError: not all ranks arrived.
        """
        if not self.quorum.has_begun():
            self.quorum.arrive()
            return
        self.is_away = True
        self._be(self._world.placement.world_size - 1)

    def _return(self) -> None:
        """Wait until the others admit this rank, and take over their state."""
        self.quorum.begin()
        self.is_away, self._takes_over = False, True
        while self._takes_over:
            self._meet(admit=True)
            time.sleep(ALONE_SECONDS * self._takes_over)
        self.quorum.tell("there")
        if self._course.is_replaying:
            self._be(self._world.placement.world_size - 1)

    def _be(self, rank: int) -> None:
        """Set the rank that the program sees; on the way back it is not the one that prints and saves."""
        self._world.placement = replace(self._world.placement, rank=rank)

    def _landed(self) -> None:
        """Join the others with their state, which replaces what the loop has changed on the way."""
        assert self._taken is not None
        self._state.load_state_dict(self._taken)
        dict.update(self._world.counts, self._taken["counts_now"])  # Counter.update adds
        self._taken = None
        self._be(self.quorum.members.index(self.number))

    # Steps

    def begin_step(self, *, admit: bool) -> None:
        if self._is_open or self._is_busy or self._course.is_replaying:
            return
        if self._come_back and self._course.is_outside:
            raise ModelError(
                "with max_lost=, a rank that is started again must know where to join: write the loop of the "
                "training as `for epoch in distwrap.resumable(range(epochs)):`, with the steps inside of it."
            )
        if not self._is_fresh:
            self._meet(admit=admit)
        self._is_open, self._is_fresh = True, False
        self._buffers = self._state.buffers()

    def begin_exchange(self) -> None:
        """Begin a step at the end of its backward, if no loader has begun it."""
        before = self._loads
        self.begin_step(admit=False)
        if self._loads != before:
            self.quorum.doom(RuntimeError("the gradients were computed with other weights"))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Let an optimizer step if the step is committed; else drop its gradients, so that it changes nothing."""
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
            return  # each rank takes its own steps
        if self._is_open:  # else another optimizer has ended this step
            self._commit()
        if not self._verdict:
            for parameter in held.values():
                parameter.grad = None

    def _commit(self) -> None:
        self._is_open = False
        error = self.quorum.error
        self._verdict = self.quorum.commit()
        self._refused = 0 if self._verdict else self._refused + 1
        if not self._verdict:
            for buffer, before in self._buffers:
                buffer.copy_(before)
        if self._refused >= _MOST_REFUSED:
            raise CollectiveError(
                f"rank {self.number} on {socket.gethostname()}: {self._refused} steps in a row were not taken, as "
                f"their exchange failed: {first_line(error) if error is not None else 'on another rank'}"
            ) from error
        if self._verdict and not self._has_committed:
            self._has_committed = True
            self.quorum.tell("committed")

    def end_round(self, mean: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """End a round of each member's own steps, and return the mean of their weights."""
        self._is_open = False  # a loss in the exchange fails no step: the others exchange again
        found = self.collective(ROUND, mean)
        self._commit()
        return found

    # The loop and its loaders

    def loop(self, elements: Iterable[Element], objects: tuple[Any, ...]) -> Iterator[Element]:
        if objects:
            self._state.objects = objects
        gc.collect()  # an optimizer that had a scheduler waits for it, and would be taken for one of the run
        self._state.things()  # refuses objects with equal names
        if not self._state.models:
            say("resumable() before wrap_model(): a rank that comes back takes over wrapped models alone")
        if self.is_away:
            self._return()
        first = self._course.begin_loop()
        loops = self._course.counts
        if first is None:
            dict.update(self._world.counts, loops[self._course.place.loop])  # Counter.update adds
            return
        for number, element in enumerate(elements):
            if number < first:
                continue
            replays = self._course.is_replaying
            self._course.begin_element(number, repr(element))
            counts = self._course.counts
            if replays:
                dict.update(self._world.counts, counts[0])  # Counter.update adds
            counts[0] = dict(self._world.counts)
            if not replays:
                self._is_open = False  # the loop may have left a step
                self._meet(admit=True)
                self._is_fresh = True
            if not self._course.is_replaying and number & (number - 1) == 0:
                self._compare()
            try:
                yield element
            except GeneratorExit:
                self._has_left = True
                self._end_loop()
                raise
            self._end_rounds()
        self._end_loop()
        self._meet(admit=False)
        self._compare()

    def _end_loop(self) -> None:
        self._course.end_loop()
        self._course.counts.append(dict(self._world.counts))

    def _after_break(self) -> None:
        """Reach the same step as the others after a break has left the loop."""
        if self._has_left:
            self._has_left = self._is_open = False
            self._end_rounds()
            self._meet(admit=False)

    def _end_rounds(self) -> None:
        for rounds in self._state.rounds.values():
            rounds.end()

    def add_loader(self, loader: Any) -> int:
        self._state.add_loader(loader)
        return self._course.add_loader()

    def begin_pass(self, number: int) -> bool:
        return self._course.begin_pass(number)

    def end_batches(self) -> None:
        if not (self._course.is_outside or self._course.is_replaying or self._is_open or self._state.rounds):
            self._meet(admit=False)  # perhaps only some members have taken the last step

    def end_pass(self, number: int, *, was_left: bool) -> None:
        self._course.end_pass(number, was_left=was_left)

    def begin_batch(self, number: int) -> None:
        if self._come_back and self._course.is_outside:
            return  # it belongs to no step yet
        place = self._course.place
        before, place.at = place.at, number
        try:
            self.begin_step(admit=self._course.admits(number))
        finally:
            place.at = before

    # State

    def add_model(self, model: nn.Module, rounds: WeightRounds | None = None) -> None:
        """Add a model that all ranks train, and its rounds if they exchange weights."""
        self._state.models.append(model)
        if rounds is not None:
            self._state.rounds[model] = rounds

    def _state_dict(self) -> dict[str, Any]:
        place = self._course.place
        return {
            **self._state.state_dict(),
            "place": replace(place, passes=list(place.passes)),
            "between": list(self._course.between),
            "log": list(self._course.log),
            "is_narrow": self._course.is_narrow,
            "counts": [*map(dict, self._course.counts)],
            "counts_now": dict(self._world.counts),
            "operations": self._operations,
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a member that is ahead."""
        self._loads += 1
        place: Place = state["place"]
        if not self._takes_over and not self._course.is_at(place):
            raise LeftBehindError(
                f"rank {self.number} on {socket.gethostname()} was so slow that it was taken for lost, and the "
                "others have gone on."
            )
        if not self._takes_over:
            self._state.load_state_dict(state)
            return
        self._taken = {name: copy.deepcopy(value) for name, value in state.items()}
        self._course.take_over(place, state["between"], state["log"])
        self._course.is_narrow, self._course.counts = state["is_narrow"], state["counts"]
        self._operations, self._takes_over = state["operations"], False
        self._is_open, self._is_fresh = place.at is not None, place.at is None

    # The end

    def conclude(self) -> None:
        if self.is_away:
            return
        self._after_break()
        self._end_rounds()  # of a loop without `resumable`
        while self.quorum.end():
            self._gather(admit=False)  # a member's last collective failed, and it needs the result

    def close(self) -> None:
        self._hook.remove()
        for rounds in self._state.rounds.values():
            rounds.close()
        self.quorum.close()
