"""Watch over tensors that several ranks train: when to look at them, and what to say where they differ."""

import time
from typing import Literal, NamedTuple

from distwrap.group.world import World
from distwrap.model.comparison import Comparison
from distwrap.model.drift_causes import SCHEDULED, SKIPPED
from distwrap.model.in_sync import Held

SHARE = 0.001  # of the time, which looks may take after the first few
_MOST = 2**20  # averages from one look to the next


class TrainingPosition(NamedTuple):
    """A position in the training of some tensors; ranks are compared at the same position.

    Attributes:
        generation: how often the ranks had begun to count anew.
        averages: how many there were before the latest one.
        event: at which the tensors were looked at; empty for an average.
        by_hand: how many updates by hand there may have been.
        state: what else must be alike.
    """

    generation: int
    averages: int
    event: Literal["", "by hand", "paused", "end"] = ""
    by_hand: int = 0
    state: tuple[object, ...] = ()

    def in_words(self, unit: str) -> str:
        """Return when that is, for a message; what is counted has the name `unit`."""
        if self.event == "end":
            return "at the end"
        if self.event == "by hand" or self.averages < 0:
            return f"after {self.by_hand} updates by hand"
        return f"after {self.averages} {unit}"


class Watch:
    """Watch over tensors that are trained on several ranks; it decides when to look at them.

    Args:
        world: of the run.
        name: of the tensors, for messages.
        key: of the tensors on the side channel, alike on all ranks.
        ranks: that train them together.

    Attributes:
        key: of the tensors.
        ranks: that train them together.
        generation: how often the averages were counted anew.
        averages: how many averages of their gradients have begun, or steps where nothing tells of averages.
    """

    unit = "averages of gradients"
    way_out = ""

    def __init__(self, world: World, name: str, key: str, ranks: list[int]) -> None:
        self._rank, self._name, self.key, self.ranks = world.placement.rank, name, key, ranks
        self.comparison = Comparison(world, key, ranks, self._message)
        self._spent = 0.0
        self._looks, self.generation = 0, -1
        self.begin_generation()

    def begin_generation(self) -> None:
        """Count anew from here, where ranks that took different numbers of averages are together again."""
        self.generation, self.averages, self._due, self._every = self.generation + 1, 0, 2, 1
        self._began = time.monotonic()
        self.comparison.forget()

    def average(self) -> None:
        """Count an average that begins now, in which all ranks use the same weights."""
        self.averages += 1
        if self.averages >= self._due:
            self._look_around()

    def end(self) -> None:
        """Look once more, as the run ends or a call in it."""

    def held(self) -> list[Held]:
        """Return the tensors."""
        raise NotImplementedError

    def cause_of(self, difference: str) -> str:
        """Return why this difference came about, and what to do, where what is trained tells; else empty."""
        return ""

    def _publish(self, event: Literal["by hand", "paused", "end"], by_hand: int, *state: object) -> None:
        """Look now, and tell at once; it is compared with ranks on which what is given here is alike."""
        position = TrainingPosition(self.generation, self.averages - 1, event, by_hand, state)
        self.comparison.publish(position, self.held())

    def _look_around(self) -> None:
        began = time.monotonic()
        self.comparison.advance()
        position = self.averages - 1
        time_to_spend = SHARE * (began - self._began) * self._looks / position
        while self._every < _MOST and self._spent > time_to_spend * self._every:
            self._every *= 2
        if is_power_of_two(position) or position % self._every == 0:
            self._looks += 1
            self.comparison.look(TrainingPosition(self.generation, position), self.held())
        power, multiple = 1 << position.bit_length(), (position // self._every + 1) * self._every
        self._due = self.averages + 1 if self.comparison else min(power, multiple) + 1
        self._spent += time.monotonic() - began

    def _message(self, position: TrainingPosition, difference: str, agreed: TrainingPosition | None) -> str:
        last = f" They last agreed {agreed.in_words(self.unit)}." if agreed is not None else ""
        if "learning rate" in difference:
            cause = SKIPPED if "does not hold the same tensors" in difference else SCHEDULED
        elif own := self.cause_of(difference):
            cause = own
        elif position.event == "by hand" or not self.averages:
            cause = (
                "Weights that are updated by hand, from autograd.grad or func.grad or in a hook, go past DDP (DW104): "
                "average each gradient before, by distwrap.reduce(gradient, 'mean')."
            )
        else:
            cause = (
                "All ranks must start with the same weights (wrap_model() sees to it), average the gradients "
                "of everything that they train (parameters outside of a wrapped model, or added to it "
                "later, are not averaged), and take the same steps with the same learning rate (DW401). A scheduler "
                "that looks at a metric needs that of all ranks: scheduler.step(distwrap.mean(loss, count))."
            )
        return (
            f"rank {self._rank}: {position.in_words(self.unit)} the ranks do not hold the same weights of "
            f"{self._name}: {difference}.{last} {cause}{self.way_out}"
        )


def is_power_of_two(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, …."""
    return number > 0 and number & (number - 1) == 0
