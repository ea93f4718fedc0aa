"""Where a loop is in its data: which epoch, and how much of its order all ranks together have gone through.

The order belongs to all ranks, and each takes its share of what is left of it. So the position is one number, alike on
every rank, and it means the same to another number of ranks and to another batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distwrap.errors import LoaderError


class Shuffle(NamedTuple):
    """An epoch's order.

    Attributes:
        order: ``"torch"``, ``"stream"``, ``"sampler"`` for a custom sampler's own, empty for none.
        seed: of the generator that draws it, or that generator's state.
    """

    order: str
    seed: int | torch.Tensor


@dataclass(frozen=True)
class Begun:
    """An iteration: of which epoch, from where in its order, and which order that is where it is not the usual one."""

    epoch: int
    start: int = 0
    shuffle: Shuffle | None = None


class Position:
    """Of a loader, shared with its samplers.

    Attributes:
        next: what the next iteration will go through.
        now: what the last one goes, or went, through; ``None`` before the first, and after a whole one.
        shuffle: the order of `now`.
        taken: how many batches the loop has had of it.
        told: whether the loop says itself which epoch comes.
    """

    def __init__(self) -> None:
        self.next = Begun(0)
        self.now: Begun | None = None
        self.shuffle = Shuffle("", 0)
        self.taken = 0
        self.told = False

    @property
    def epoch(self) -> int:
        """The one under way, or the next."""
        return (self.now or self.next).epoch

    def begin(self, usual: Callable[[int], Shuffle]) -> tuple[Begun, Shuffle]:
        """Start an iteration.

        Args:
            usual: says an epoch's order, where a saved position does not.
        """
        self.now, self.taken = self.next, 0
        self.next = Begun(self.now.epoch + 1)
        self.shuffle = self.now.shuffle or usual(self.now.epoch)
        return self.now, self.shuffle

    def count(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Pass the batches on, and know how many the loop has had: workers are ahead of it."""
        for self.taken, batch in enumerate(batches, 1):
            yield batch
        self.now = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; a position in that very epoch, from a saved state, stays."""
        self.told = True
        if self.now is not None or epoch != self.next.epoch:
            self.next, self.now = Begun(epoch), None

    def state(self, consumed: Callable[[int, int], int], usual: Callable[[int], Shuffle]) -> dict[str, Any]:
        """Return it as numbers.

        Args:
            consumed: says how far the order is gone through, from a start and a number of batches.
            usual: says an epoch's order.
        """
        if self.now is not None:
            begun, shuffle, at = self.now, self.shuffle, consumed(self.now.start, self.taken)
        else:
            begun, at = self.next, self.next.start
            shuffle = begun.shuffle or usual(begun.epoch)
        return {"epoch": begun.epoch, "consumed": at, "order": shuffle.order, "seed": shuffle.seed}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        shuffle = Shuffle(state["order"], state["seed"]) if state["consumed"] else None
        self.next, self.now = Begun(state["epoch"], state["consumed"], shuffle), None


def check(state: Any, unit: str, items: int | None, custom: bool) -> None:
    """Refuse a state that is none, or another loader's.

    Args:
        state: what `load_state_dict` was given.
        unit: what this loader counts in, ``"samples"`` or ``"batches"``.
        items: how many of them it has; ``None`` where nobody knows.
        custom: whether the order is a custom sampler's.
    """
    wanted = {"epoch", "consumed", "order", "seed", "unit", "items"}
    if not isinstance(state, dict) or not wanted <= state.keys():
        raise LoaderError(
            f"this is no position of a sharded loader: {type(state).__name__}"
            f"{' with ' + ', '.join(map(repr, list(state)[:6])) if isinstance(state, dict) else ''}. "
            f"load_state_dict() takes what state_dict() of a loader from shard_loader() has returned."
        )
    if (state["unit"], state["items"]) != (unit, items):
        raise LoaderError(
            f"the position is of a loader over {state['items']} {state['unit']}, but this one has {items} {unit}: "
            f"what was taken of those says nothing about these. Load it into the same data."
        )
    if state["consumed"] and (state["order"] == "sampler") is not custom:
        of_one, of_other = (
            ("a custom sampler's", "this loader's") if not custom else ("a plain loader's", "a sampler's")
        )
        raise LoaderError(
            f"the position is in {of_one} order, but the order here is {of_other}: it cannot be gone on with. "
            f"Give the loader the sampler that it had."
        )
