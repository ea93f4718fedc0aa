"""Notice that `ReduceLROnPlateau` is stepped with another number on each rank: their learning rates would part."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import ReduceLROnPlateau

from distwrap.errors import DriftError
from distwrap.group.tensor_exchange import ranks_of_shares
from distwrap.group.world import RunPart, World
from distwrap.model.wrapped_models import WrappedModels
from distwrap.supervision.users_source import place_of, users_frames

_ALIKE = 1e-5  # of the number: ranks that each evaluate on all data may round it differently
_KEPT = 8  # calls whose numbers another rank can still read
_TRIES = 1000  # optimizer steps, after which a rank that has not come to the call will not


class Plateaus(RunPart):
    """The schedulers of a run that look at a metric; their ``step`` is looked at for the time of the run.

    Attributes:
        pending: calls that are not compared yet, which each optimizer step does.
    """

    def __init__(self, world: World) -> None:
        assert world.channel is not None
        self._world, self._channel = world, world.channel
        self._calls: WeakKeyDictionary[ReduceLROnPlateau, _Calls] = WeakKeyDictionary()
        self.pending: list[_Call] = []
        self._plain = ReduceLROnPlateau.step
        ReduceLROnPlateau.step = self._looked_at(self._plain)  # type: ignore[method-assign]

    def _looked_at(self, plain: Any) -> Any:
        @wraps(plain)
        def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(scheduler, metrics, *args, **kwargs)
            if self._world.part(WrappedModels).of_optimizer(scheduler.optimizer):
                self._tell(scheduler, float(metrics))
            return result

        return step

    def _tell(self, scheduler: ReduceLROnPlateau, number: float) -> None:
        if scheduler not in self._calls:
            self._calls[scheduler] = _Calls(f"plateau/{self._world.count('a scheduler that looks at a metric')}")
        calls = self._calls[scheduler]
        calls.count += 1
        calls.numbers.append(number)
        self._channel.note(calls.key, json.dumps([calls.count, [*calls.numbers]]), scheduler)
        self.pending.append(_Call(calls.key, calls.count, number, place_of(next(users_frames(), None))))
        self.compare()

    def compare(self) -> None:
        """Compare calls with those of the other ranks.

        Raises:
            DriftError: a rank has given another number.
        """
        own = self._world.placement.rank
        for call in list(self.pending):
            call.tries += 1
            told = {rank: self._number(call, rank) for rank in ranks_of_shares() if rank != own}
            for rank, theirs in told.items():
                if theirs is not None and not _are_alike(theirs, call.number):
                    raise DriftError(
                        f"rank {own}: ReduceLROnPlateau was stepped with {call.number:.7g} here and with "
                        f"{theirs:.7g} on rank {rank}, in its call "
                        f"{call.count}{call.place and f' at {call.place}'}: the ranks would choose different "
                        "learning rates, and train apart. Give it the same number on all ranks, as "
                        "scheduler.step(distwrap.mean(loss, count))."
                    )
            if None not in told.values() or call.tries > _TRIES:
                self.pending.remove(call)

    def _number(self, call: _Call, rank: int) -> float | None:
        """Return what another rank has given in a call; ``None`` where it has not come to it, or has gone on far."""
        count, numbers = json.loads(self._channel.noted(call.key, rank) or "[0, []]")
        place = len(numbers) - 1 - (count - call.count)
        return float(numbers[place]) if 0 <= place < len(numbers) else None

    def wait(self) -> None:
        """Compare what is not compared yet."""
        self.compare()

    def close(self) -> None:
        """Look no more."""
        ReduceLROnPlateau.step = self._plain  # type: ignore[method-assign]


@dataclass
class _Calls:
    """The calls of one scheduler.

    Attributes:
        key: of the scheduler on the side channel, alike on all ranks.
        count: how many there were.
        numbers: which the latest of them were given.
    """

    key: str
    count: int = 0
    numbers: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))


@dataclass(eq=False)
class _Call:
    """One call, until it is compared.

    Attributes:
        key: of its scheduler.
        count: which of the scheduler's calls it is, from 1 on.
        number: which it was given.
        place: in the user's code.
        tries: how often it was looked at.
    """

    key: str
    count: int
    number: float
    place: str
    tries: int = 0


def _are_alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ALIKE) or (math.isnan(one) and math.isnan(other))
