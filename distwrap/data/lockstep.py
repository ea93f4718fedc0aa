"""`lockstep`: all ranks take the same number of steps, whatever happens on one of them.

Before each step the ranks exchange a status of a few numbers: who is out of data, wants to stop or to skip, or was
told that the node is wanted back. All of them then take the same branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from enum import IntEnum
from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from distwrap.checks import SECONDS, one_of
from distwrap.data.empty_batches import EmptyBatches, emptied
from distwrap.data.position import fetching_ahead, move
from distwrap.data.preemption import SIGNALS, Listener, Preemption, shielded
from distwrap.data.votes import Votes
from distwrap.errors import LoaderError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.setup import require_group
from distwrap.group.world import RunPart, World, current_world, is_first_time, say
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity
from distwrap.wording import named_ranks

Batch = TypeVar("Batch")
Uneven = Literal["shortest", "pad", "empty"]

stacks.LOOPS[__file__] = "lockstep"
_NOTHING: Any = object()
_IN_WINDOW = 2
# The name of the loop, and what to do where a rank ran out of data, for the line about it.
_OF_LOCKSTEP = "lockstep", "uneven='pad' would use all of it, and uneven='empty' is for an evaluation"


class _Flag(IntEnum):
    """Places in the status, of each of which the ranks take the maximum."""

    OUT = 0  # a rank has gone through its loader
    HAS = 1  # a rank has a batch of its first pass
    STOP = 2
    SKIP = 3
    PREEMPTED = 4
    # A rank has nothing to repeat, or to empty; _IN_WINDOW where there is no step, but one is under way.
    EMPTY = 5


def lockstep(
    loader: Iterable[Batch],
    *,
    uneven: Uneven = "shortest",
    skip: Callable[[Batch], bool] | None = None,
    on_preempt: Callable[[Preemption], object] | None = None,
    grace: float = 30.0,
    empty: Callable[[Batch], Batch] | None = None,
) -> Lockstep[Batch]:
    """Iterate over a loader so that all ranks take the same steps; the same rules hold in a single process.

    If one rank runs out of data, calls ``stop()``, or leaves the loop after its step, all ranks stop; if one rank skips
    a batch, all skip that step. SIGTERM and SIGUSR2, by which clusters announce that they will take the node away, only
    set a flag: all ranks leave before the same step, after `on_preempt`, and later lockstep loops of the run end at
    once. Signals are noticed in the main thread only.

    Args:
        loader: any iterable, such as a sharded ``DataLoader``; every rank iterates over its own.
        uneven: ``"shortest"`` ends when the first rank is out of data. ``"pad"`` goes on until the last rank is, and
            the others begin their loader again. With ``"empty"`` these continue with batches without samples, so that
            an evaluation counts each sample once, and may gather in its loop.
        skip: a function that is called with each batch; if it returns true on any rank, all ranks skip that step.
        on_preempt: a function that is called on every rank with a `Preemption` before a signal ends the loop; it may
            `save`.
        grace: seconds from the signal until the node is taken away; Slurm and Kubernetes give 30 by default.
        empty: a function that makes a batch without samples from another one, for ``"empty"``. By default tensors and
            arrays lose their rows, lists of texts and numbers lose their items, and lists of tensors are treated as
            columns.

    Returns:
        An iterable with ``stop()``, ``step``, ``skipped`` and ``preempted``; each iteration goes through the loader
        once.

    Raises:
        LoaderError: with ``"pad"``, a rank has no batch at all; with ``"empty"``, no empty batch can be made. Raised on
            every rank.

    Each step costs an all-reduce of six numbers between the processes' CPUs. A rank that leaves its loop by ``break``
    must have taken part in the step's collectives. The position of a sharded loader is after the last batch that the
    loop was given: a batch that was only fetched when the ranks agreed to leave comes again.

    Together with `accumulate`, around it or inside it, a step is a whole window: `stop` and signals let the window
    finish, the last one has the same size on all ranks, and a second all-reduce tells that a rank has left within a
    window.

    Example:
        >>> steps = lockstep([1, 2, 3, 4], skip=lambda batch: batch == 2)
        >>> for batch in steps:
        ...     if batch == 3:
        ...         steps.stop()
        ...     print(batch)
        1
        3
        >>> steps.step, steps.skipped, steps.preempted
        (2, 1, None)
    """
    one_of("way with uneven loaders", get_args(Uneven))("uneven", uneven)
    return Lockstep(loader, uneven, skip, on_preempt, SECONDS("grace", grace), empty=empty)


def in_step(loader: Any, uneven: Uneven, site: str) -> Lockstep[Any]:
    """Return a sharded loader whose ranks may end unevenly in step; it leaves signals alone.

    Args:
        loader: with batches of this rank.
        uneven: as in `lockstep`.
        site: where the user has sharded the loader, for messages.
    """
    words = (
        f"a loop over the loader sharded{site and f' at {site}'}",
        "shard_loader(loader, mode='pad') would use all of it, and mode='exact' is for an evaluation",
    )
    return Lockstep(loader, uneven, None, None, 30.0, listens=False, words=words)


class LockstepStatus(RunPart):
    """Exchange of the loops' status among the ranks of a run.

    Attributes:
        preempted: how the node was wanted back, once it was.
    """

    def __init__(self, world: World) -> None:
        self.preempted: Preemption | None = None
        self._group: Any = None
        self._votes, self._activity = Votes(), world.part(Activity)
        if world.placement.world_size > 1:
            require_group("lockstep")
            # Of the CPUs, for the status alone, so that a vote never meets another collective.
            self._group = world.new_group(backend="gloo")

    def maximum(self, numbers: list[int]) -> list[int]:
        """Return the largest of all ranks' numbers, place by place."""
        if self._group is None:
            return numbers
        self._activity.turns += 1
        status = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        dist.all_reduce(status, op=dist.ReduceOp.MAX, group=self._group)
        return status.tolist()

    def vote_to_stop(self) -> None:
        """Let the other ranks stop before their next step, and wait for none of them."""
        if self._group is not None and dist.is_initialized():
            self._activity.turns += 1
            status = torch.tensor([flag is _Flag.STOP for flag in _Flag], dtype=torch.int32, device="cpu")
            self._votes.cast(status, self._group)

    def wait(self) -> None:
        """Wait until the other ranks have got the message that this one has left."""
        self._votes.wait()

    def gathered(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank."""
        if self._group is None:
            return [numbers]
        everyone = [torch.zeros(len(numbers), dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.tensor(numbers, dtype=torch.int64, device="cpu"), group=self._group)
        return [row.tolist() for row in everyone]


class Lockstep(Generic[Batch]):
    """Iterable over a loader's batches, in step with the other ranks.

    Attributes:
        step: how many steps this iteration has begun.
        skipped: how many batches it has skipped.
        preempted: how the node was wanted back, or ``None``.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        uneven: Uneven,
        skip: Callable[[Batch], bool] | None,
        on_preempt: Callable[[Preemption], object] | None,
        grace: float,
        listens: bool = True,
        empty: Callable[[Batch], Batch] | None = None,
        words: tuple[str, str] = _OF_LOCKSTEP,
    ) -> None:
        self._words = words
        self._empty: Callable[[Any], Any] = emptied if empty is None else empty
        self._loader, self._uneven, self._skip = loader, uneven, skip
        self._listens = listens
        self._on_preempt, self._grace = on_preempt, grace
        self._stop = self._is_left = False
        self._has_more = False
        self.step = self.skipped = 0
        self.preempted: Preemption | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def stop(self) -> None:
        """End the loop of all ranks before the next step."""
        self._stop = True

    def is_left(self) -> bool:
        """Return whether a rank has left its loop by itself since the last step; every rank asks."""
        numbers = [_IN_WINDOW if flag is _Flag.EMPTY else 0 for flag in _Flag]
        seen = current_world().part(LockstepStatus).maximum(numbers)
        parted = bool(seen[_Flag.OUT] or seen[_Flag.HAS])
        self._is_left = parted or bool(seen[_Flag.STOP])
        if parted:
            raise _parted()
        return self._is_left

    def __iter__(self) -> Iterator[Batch]:
        # Windows of accumulate() go around the steps, so that they are of one size on all ranks.
        in_windows: Callable[..., Iterator[Batch]] | None = getattr(self._loader, "in_windows", None)
        steps = in_windows(self, self._skip) if in_windows else self.steps(self._loader, self._skip)
        return current_world().part(Activity).timed(steps)

    def steps(self, loader: Iterable[Any], skip: Callable[[Any], bool] | None) -> Iterator[Any]:
        """Yield a loader's batches, in step."""
        world = current_world()
        check_collectives_allowed("lockstep()")
        status = world.part(LockstepStatus)
        self.step, self.skipped, self._stop, self._is_left = 0, 0, False, False
        listener = Listener(SIGNALS if self._listens else ())
        batches: Iterator[Any]
        try:
            with shielded(loader, self._grace):
                batches = _begin(loader, "_rank_batches")
            world.part(Activity).follow(self)
            first_pass, empties = True, EmptyBatches(self._empty)
            moves: list[Callable[[], None]] = []
            no_moves: list[Callable[[], None]] = []
            while True:
                # A loop that nobody can stop has all that is fetched.
                fetching: Any = fetching_ahead if self._listens else partial(nullcontext, no_moves)
                with fetching() as ahead:
                    batch = _NOTHING if empties.are_due else next(batches, _NOTHING)
                    if batch is _NOTHING and self._uneven == "pad":
                        first_pass, batches = False, _begin(loader, "_same_epoch")
                        batch = next(batches, _NOTHING)
                moves += ahead
                has = self._has_more = batch is not _NOTHING
                if self._uneven == "empty":
                    empties.note(batch) if has else empties.begin()
                mine = {
                    _Flag.OUT: not (has and first_pass),
                    _Flag.HAS: has and first_pass,
                    _Flag.STOP: self._stop,
                    _Flag.SKIP: has and skip is not None and bool(skip(batch)),
                    _Flag.PREEMPTED: listener.heard is not None or status.preempted is not None,
                    _Flag.EMPTY: (self._uneven == "pad" and not has) or empties.are_unknown,
                }
                seen = status.maximum([int(mine[flag]) for flag in _Flag])
                if self._ends(seen, world, status, listener):
                    if not has:
                        move(*moves)
                    return
                if seen[_Flag.SKIP]:
                    self.skipped += 1
                    continue
                if seen[_Flag.EMPTY]:
                    empties.agree()
                move(*moves)  # of a batch that no rank trains on, none is made
                moves.clear()
                self.step += 1
                yield batch if has else empties.batch
        except GeneratorExit:  # the user's loop was left by itself, not by all ranks
            if current_world() is world and not self._is_left:
                status.vote_to_stop()
            raise
        finally:
            listener.close()

    def _ends(self, seen: list[int], world: World, status: LockstepStatus, listener: Listener) -> bool:
        """Return whether all ranks end here, after doing what must be done before."""
        if seen[_Flag.EMPTY] == _IN_WINDOW:
            raise _parted()
        if seen[_Flag.PREEMPTED]:
            self._leave_preempted(status, listener)
            return True
        if seen[_Flag.EMPTY] and self._uneven == "pad":
            raise LoaderError(
                "lockstep(uneven='pad') repeats batches of ranks that run out, but some rank has no batch at "
                f"all (seen on rank {world.placement.rank} of {world.placement.world_size}). Use uneven='shortest'."
            )
        if seen[_Flag.STOP]:
            return True
        if self._uneven != "shortest":
            return not seen[_Flag.HAS]
        if seen[_Flag.OUT] and seen[_Flag.HAS] and is_first_time("uneven"):
            out = [rank for rank, (has_more,) in enumerate(status.gathered([self._has_more])) if not has_more]
            say(
                f"{self._words[0]} ended after step {self.step}, when {named_ranks(out)} ran out of data while the "
                f"others had more. {self._words[1]}"
            )
        return bool(seen[_Flag.OUT])

    def _leave_preempted(self, status: LockstepStatus, listener: Listener) -> None:
        if status.preempted is None:
            number, moment = listener.heard or (0, 0.0)
            heard = enumerate(status.gathered([number, int(moment * 1000)]))
            milliseconds, rank, number = min((when, rank, sent) for rank, (sent, when) in heard if sent)
            self.preempted = Preemption(number, rank, self.step, milliseconds / 1000 + self._grace)
            status.preempted = self.preempted
            say(str(self.preempted))
            if self._on_preempt is not None:
                self._on_preempt(self.preempted)
        self.preempted = status.preempted


def _begin(loader: Iterable[Any], how: str) -> Iterator[Any]:
    """Return an iterator over a loader, and not one that is in step itself; a sharded loader has methods for it."""
    begin: Callable[[], Iterator[Any]] = getattr(loader, how, partial(iter, loader))
    return begin()


def _parted() -> LoaderError:
    return LoaderError(
        "lockstep() and accumulate() do not work together here: on some ranks, but not on all, something is "
        f"between the two, as a progress bar (seen on rank {current_world().placement.rank}). Put it around "
        "both of them, on all ranks."
    )
