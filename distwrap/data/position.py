"""Position of a loop in its data: the epoch, and how much of its order all ranks together have gone through.

The order belongs to all ranks, and each takes its share of what is left of it. So the position is one number, alike on
every rank, and it means the same to another number of ranks and to another batch size.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from distwrap.errors import LoaderError


class Shuffle(NamedTuple):
    """Order of an epoch.

    Attributes:
        order: ``"torch"``, ``"stream"``, ``"sampler"`` for a custom sampler's own, empty for none.
        seed: of the generator that draws the order, or that generator's state.
    """

    order: str
    seed: int | torch.Tensor


@dataclass(frozen=True)
class EpochStart:
    """Start of an iteration.

    Attributes:
        epoch: the epoch.
        start: the place in its order.
        shuffle: that order, where it is not the usual one.
        skip: how many batches from there are left out, where a place alone does not say it.
    """

    epoch: int
    start: int = 0
    shuffle: Shuffle | None = None
    skip: int = 0


class Position:
    """Position of a loader in its data, shared with its samplers.

    Attributes:
        next: start of the next iteration.
        now: start of the last iteration; ``None`` before the first, and after one that came to its end.
        shuffle: the order of `now`.
        skipped: `next`, where `skip` has moved it from the start of an epoch.
        batches_taken: how many batches the loop has had of `now`.
        epoch_is_explicit: whether the loop calls `set_epoch` itself.
    """

    def __init__(self) -> None:
        self.next = EpochStart(0)
        self.now: EpochStart | None = None
        self.skipped: EpochStart | None = None
        self.shuffle = Shuffle("", 0)
        self.batches_taken = 0
        self.epoch_is_explicit = False

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one."""
        return (self.now or self.next).epoch

    def begin(self, usual: Callable[[int], Shuffle]) -> tuple[EpochStart, Shuffle]:
        """Start an iteration.

        Args:
            usual: returns an epoch's order, where no saved position has one.
        """
        self.now, self.batches_taken = self.next, self.next.skip
        self.next = EpochStart(self.now.epoch + 1)
        self.shuffle = self.now.shuffle or usual(self.now.epoch)
        return self.now, self.shuffle

    def count(self, batches: Iterable[Any], skipped: int = 0) -> Iterator[Any]:
        """Yield the batches, and count those that the loop has had, after skipped ones: workers are ahead of it."""
        for taken, batch in enumerate(batches, 1 + skipped):
            move(partial(self._move, self.now, taken))
            yield batch
        move(partial(self._move, self.now, None))

    def _move(self, begun: EpochStart | None, taken: int | None) -> None:
        """Go to a number of batches of an iteration, or to its end, unless the next one has begun since."""
        if self.now is begun and taken is not None:
            self.batches_taken = taken
        elif self.now is begun:
            self.now = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch; a position in that very epoch, from a saved state, stays, and so does a skip."""
        self.epoch_is_explicit = True
        if self.now is not None or epoch != self.next.epoch:
            is_skipped = self.now is None and self.next is self.skipped
            self.next, self.now = replace(self.next, epoch=epoch) if is_skipped else EpochStart(epoch), None
            self.skipped = self.next if is_skipped else None

    def state(self, consumed: Callable[[int, int], int], usual: Callable[[int], Shuffle]) -> dict[str, Any]:
        """Return the position as numbers.

        Args:
            consumed: returns how many items of the order are gone through, from a start and a number of batches.
            usual: returns an epoch's order.
        """
        if self.now is not None:
            begun, shuffle, at = self.now, self.shuffle, consumed(self.now.start, self.batches_taken)
        else:
            begun, at = self.next, consumed(self.next.start, self.next.skip)
            shuffle = begun.shuffle or usual(begun.epoch)
        return {"epoch": begun.epoch, "consumed": at, "order": shuffle.order, "seed": shuffle.seed}

    def load(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue from a position that `state` has returned."""
        shuffle = Shuffle(state["order"], state["seed"]) if state["consumed"] else None
        self.next, self.now = EpochStart(state["epoch"], state["consumed"], shuffle), None


class _Ahead(threading.local):
    moves: list[Callable[[], None]] | None = None


_ahead = _Ahead()


@contextmanager
def fetching_ahead() -> Iterator[list[Callable[[], None]]]:
    """Collect the moves of positions while a batch is fetched that the loop does not have yet, and may never have."""
    moves: list[Callable[[], None]] = []
    before, _ahead.moves = _ahead.moves, moves
    try:
        yield moves
    finally:
        _ahead.moves = before


def is_ahead() -> bool:
    """Return whether the batch that is being fetched is ahead of the loop."""
    return _ahead.moves is not None


def move(*moves: Callable[[], None]) -> None:
    """Make moves of positions, once the loop has the batch; who fetches ahead of the loop makes them later."""
    if _ahead.moves is not None:
        _ahead.moves.extend(moves)
        return
    for make in moves:
        make()


def check_state(state: Any, unit: str, items: int | None, custom: bool) -> None:
    """Raise an error if a state is not a position, or is that of another loader.

    Args:
        state: the argument of `load_state_dict`.
        unit: what this loader counts in, ``"samples"`` or ``"batches"``.
        items: how many of them it has; ``None`` where nobody knows.
        custom: whether the order is a custom sampler's.

    Raises:
        LoaderError: says what the state is instead.
    """
    wanted = {"epoch", "consumed", "order", "seed", "unit", "items"}
    if not isinstance(state, dict) or not wanted <= state.keys():
        keys = f" with {', '.join(map(repr, list(state)[:6]))}" if isinstance(state, dict) else ""
        raise LoaderError(
            f"this is not the position of a sharded loader, but a {type(state).__name__}{keys}. "
            "load_state_dict() takes "
            f"what state_dict() of a loader from shard_loader() has returned."
        )
    if (state["unit"], state["items"]) != (unit, items):
        raise LoaderError(
            f"the position is of a loader over {state['items']} {state['unit']}, but this one has {items} "
            f"{unit}: a position in one dataset means nothing in another. Load it into a loader over the same data."
        )
    if state["consumed"] and (state["order"] == "sampler") is not custom:
        of_one, of_other = ("a plain loader's", "a sampler's") if custom else ("a custom sampler's", "this loader's")
        raise LoaderError(
            f"the position is in {of_one} order, but the order here is {of_other}: the loader cannot continue "
            "from it. Give the loader the sampler that it had when the position was saved."
        )


def check_stream_state(state: Any, rank: int, world_size: int) -> None:
    """Raise an error if a state is not a position in an iterable dataset, or is that of another rank.

    Raises:
        LoaderError: says what the state is instead.
    """
    if not isinstance(state, dict) or not {"rank", "world_size", "epoch"} <= state.keys():
        raise LoaderError("this is not the position of a sharded loader over an iterable dataset.")
    if (state["rank"], state["world_size"]) != (rank, world_size):
        raise LoaderError(
            f"the position is rank {state['rank']}'s of {state['world_size']}, but this is rank {rank} of "
            f"{world_size}: in an iterable dataset each rank has a position of its own. Save one for each rank "
            "(distwrap.gather_object), and continue with the same number of ranks."
        )
