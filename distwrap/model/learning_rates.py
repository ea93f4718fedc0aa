"""Notice, at the step where it happens, that an optimizer has another learning rate on some rank."""

from __future__ import annotations

import json
from collections import deque
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer

from distwrap.errors import DriftError
from distwrap.group.world import RunPart, World
from distwrap.model.drift import Drift, ModelWatch
from distwrap.model.watch import is_power_of_two

_ALL_TOLD = 8  # changes; of more, as of a schedule that moves at each step, the 16th, 32nd, 64th, …
_KEPT = 8  # changes that another rank can still read
_KNOWN = 1024  # changes with which another rank's can still be compared, of which this one hears some steps later


class LearningRates(RunPart):
    """The learning rates of a run's optimizers.

    A rank tells when one has changed, and rings the others, which compare it with their own once they are past that
    step.
    """

    def __init__(self, world: World) -> None:
        assert world.channel is not None
        self._world, self._channel, self._drift = world, world.channel, world.part(Drift)
        self._of: WeakKeyDictionary[Optimizer, _Rates] = WeakKeyDictionary()
        self._rung = False
        self._channel.on_ring = self._ring

    def _ring(self) -> None:
        self._rung = True

    def step(self, optimizer: Optimizer) -> None:
        """Look at the rates of an optimizer that is about to step.

        Raises:
            DriftError: another rank took an earlier step with another rate.
        """
        now = [group.get("lr") for group in optimizer.param_groups]
        own = self._of.get(optimizer)
        if own is None or own.now != now:
            self._change(optimizer, own, now)
        if self._rung:
            self._compare()

    def _change(self, optimizer: Optimizer, own: _Rates | None, now: list[float | None]) -> None:
        if own is None:
            watch = self._drift.watch_of(optimizer)
            if watch is None:
                return
            key = f"rates/{watch.key}/{self._world.count(f'an optimizer of {watch.key}')}"
            own = self._of[optimizer] = _Rates(key, watch)
        if own.change(now):
            self._channel.note(own.key, json.dumps(list(own.changes)[-_KEPT:]), optimizer)
            self._channel.ring_others()

    def _compare(self) -> None:
        self._rung = False
        for optimizer, own in list(self._of.items()):
            for rank in own.watch.ranks:
                if rank == self._world.placement.rank:
                    continue
                noted = self._channel.noted(own.key, rank)
                for theirs in json.loads(noted) if noted else ():
                    self._compare_with(rank, _Change(*theirs), own, type(optimizer).__name__)

    def _compare_with(self, rank: int, theirs: _Change, own: _Rates, name: str) -> None:
        if own.watch.era != theirs.era:  # in which some ranks took fewer steps
            return
        if own.watch.averages <= theirs.averages:  # in that step, this rank's may still change
            self._rung = True
            return
        known = own.at(theirs)
        if known and theirs.rates not in known:
            raise DriftError(
                f"rank {self._world.placement.rank}: the learning rate of {name} is {_in_words(known[-1])} "
                f"here and {_in_words(theirs.rates)} on rank {rank}, in the step after {theirs.averages} "
                "averages of gradients: the ranks would train apart. The code that chooses it must see the "
                "same numbers on every rank, as in scheduler.step(distwrap.mean(loss, count)), and every rank "
                "must step its schedulers equally often."
            )


class _Change(NamedTuple):
    """Rates of an optimizer's groups of parameters, from a step on.

    Attributes:
        era: as in `TrainingPosition`.
        averages: how many had begun, which are as many on all ranks at one step.
        rates: one for each group.
    """

    era: int
    averages: int
    rates: list[float]


class _Rates:
    """The rates of one optimizer on this rank.

    Args:
        key: alike on all ranks.
        watch: over the model that it trains.

    Attributes:
        now: as they are.
        changes: the latest of them.
    """

    def __init__(self, key: str, watch: ModelWatch) -> None:
        self.key, self.watch = key, watch
        self.now: list[float | None] = []
        self.changes: deque[_Change] = deque(maxlen=_KNOWN)
        self._count = 0

    def change(self, now: list[float | None]) -> bool:
        """Keep a change; return whether it is to be told."""
        self.now = now
        rates = [float(rate or 0.0) for rate in now]
        self.changes.append(_Change(self.watch.era, self.watch.averages, rates))
        self._count += 1
        return self._count > 1 and (self._count <= _ALL_TOLD or is_power_of_two(self._count))

    def at(self, other: _Change) -> list[list[float]]:
        """Return the rates that this rank had in the step of another rank's change; none where that is forgotten."""
        then = (other.era, other.averages)
        before = [change.rates for change in self.changes if change[:2] < then]
        return before[-1:] + [change.rates for change in self.changes if change[:2] == then]


def _in_words(rates: list[float]) -> str:
    return f"{rates[0]:.7g}" if len(rates) == 1 else str([float(f"{rate:.7g}") for rate in rates])
