"""`lockstep`: all ranks take the same number of steps, whatever happens on one of them.

Before each step the ranks exchange a status of a few numbers: who is out of data, wants to stop or to skip, or was
told that the machine is wanted back. All of them then take the same branch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from enum import IntEnum
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from distwrap.checks import SECONDS
from distwrap.data.preemption import SIGNALS, Listener, Preemption, shielded
from distwrap.errors import LoaderError, OptionError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.setup import require_group
from distwrap.group.world import RunPart, World, current_world, is_first_time, say
from distwrap.supervision.activity import Activity
from distwrap.wording import named_ranks, unknown_name

Batch = TypeVar("Batch")
Uneven = Literal["shortest", "pad"]

_NOTHING: Any = object()


class _Flag(IntEnum):
    """The places of the status; of each the ranks take the maximum."""

    OUT = 0  # a rank has gone through its loader
    HAS = 1  # a rank has a batch of its first pass
    STOP = 2
    SKIP = 3
    PREEMPTED = 4
    EMPTY = 5  # a rank's loader has nothing to repeat


def lockstep(
    loader: Iterable[Batch],
    *,
    uneven: Uneven = "shortest",
    skip: Callable[[Batch], bool] | None = None,
    on_preempt: Callable[[Preemption], object] | None = None,
    grace: float = 30.0,
) -> Lockstep[Batch]:
    """Iterate over a loader so that all ranks take the same steps; in a single process the rules are the same.

    Where one rank runs out of data, calls ``stop()``, leaves the loop after its step, or has a batch to skip, all do.
    SIGTERM and SIGUSR2, by which clusters announce that they want the machine back, only set a flag meanwhile: all
    ranks then leave before the same step, after `on_preempt`; so do later lockstep loops of the run, at once. Signals
    are heard in the main thread alone.

    Args:
        loader: any iterable, as a sharded ``DataLoader``; every rank iterates over its own.
        uneven: ``"shortest"`` ends when the first rank is out; ``"pad"`` goes on until the last one is, the others
            begin their loader again.
        skip: asked for each batch; if it says yes on any rank, all ranks skip that step.
        on_preempt: called on every rank before the loop ends for a signal, with a `Preemption`; may `save`.
        grace: seconds from the signal until the machine is taken away; Slurm and Kubernetes give 30 by default.

    Returns:
        An iterable with ``stop()``, ``step``, ``skipped`` and ``preempted``; each iteration goes through the loader.

    Raises:
        LoaderError: with ``"pad"``, a rank has no batch at all; on every rank.

    The cost is an all-reduce of six numbers a step, between the processes' CPUs. A rank that leaves its loop by
    ``break`` must have done its part of the step's collectives.

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
    if uneven not in get_args(Uneven):
        raise OptionError(unknown_name("way with uneven loaders", uneven, get_args(Uneven)))
    return Lockstep(loader, uneven, skip, on_preempt, SECONDS("grace", grace))


def in_step(loader: Any, uneven: Uneven) -> Iterator[Any]:
    """Iterate in step over a sharded loader that has no length, and leave signals alone."""
    return iter(Lockstep(loader, uneven, None, None, 30.0, listens=False))


class LockstepRun(RunPart):
    """State of one run that all its lockstep loops share.

    Attributes:
        group: of the CPUs, in which the ranks exchange their status; ``None`` until it is needed.
        preempted: how the machine was wanted back, once it was.
    """

    def __init__(self, world: World) -> None:
        self.group: Any = None
        self.preempted: Preemption | None = None


class Lockstep(Generic[Batch]):
    """What `lockstep` returns.

    Attributes:
        step: how many steps this iteration has begun.
        skipped: how many it has skipped.
        preempted: how the machine was wanted back, or ``None``.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        uneven: Uneven,
        skip: Callable[[Batch], bool] | None,
        on_preempt: Callable[[Preemption], object] | None,
        grace: float,
        listens: bool = True,
    ) -> None:
        self._loader, self._uneven, self._skip = loader, uneven, skip
        self._listens = listens
        self._on_preempt, self._grace = on_preempt, grace
        self._stop = False
        self._vote: Any = None
        self._has_more = False
        self.step = self.skipped = 0
        self.preempted: Preemption | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def stop(self) -> None:
        """End the loop of all ranks before the next step."""
        self._stop = True

    def __iter__(self) -> Iterator[Batch]:
        world = current_world()
        check_collectives_allowed("lockstep()")
        group = _status_group(world)
        self.step, self.skipped, self._stop = 0, 0, False
        listener = Listener(SIGNALS if self._listens else ())
        batches: Iterator[Batch]
        in_step = True
        try:
            with shielded(self._loader, self._grace):
                batches = self._begin()
            world.part(Activity).follow(self)
            first_pass = True
            while True:
                batch = next(batches, _NOTHING)
                if batch is _NOTHING and self._uneven == "pad":
                    first_pass, batches = False, self._begin()
                    batch = next(batches, _NOTHING)
                seen = self._exchange(group, batch, first_pass, listener, world)
                if self._ends(seen, world, group, listener):
                    in_step = False
                    return
                if seen[_Flag.SKIP]:
                    self.skipped += 1
                    continue
                self.step += 1
                yield batch
        finally:
            listener.close()
            if in_step and isinstance(sys.exc_info()[1], GeneratorExit):
                self._vote_to_stop(group, world)

    def _begin(self) -> Iterator[Batch]:
        """Iterate over the loader, but not in step twice."""
        begin: Callable[[], Iterator[Batch]] = getattr(self._loader, "_rank_batches", self._loader.__iter__)
        return begin()

    def _exchange(self, group: Any, batch: Any, first_pass: bool, listener: Listener, world: World) -> list[int]:
        """Return what any rank says."""
        has = self._has_more = batch is not _NOTHING
        mine = [0] * len(_Flag)
        mine[_Flag.OUT] = not (has and first_pass)
        mine[_Flag.HAS] = has and first_pass
        mine[_Flag.STOP] = self._stop
        mine[_Flag.SKIP] = has and self._skip is not None and bool(self._skip(batch))
        mine[_Flag.PREEMPTED] = listener.heard is not None or world.part(LockstepRun).preempted is not None
        mine[_Flag.EMPTY] = self._uneven == "pad" and not has
        if group is None:
            return mine
        status = torch.tensor(mine, dtype=torch.int32)
        dist.all_reduce(status, op=dist.ReduceOp.MAX, group=group)
        return status.tolist()

    def _ends(self, seen: list[int], world: World, group: Any, listener: Listener) -> bool:
        """Say whether all ranks end here, after what is to be done before."""
        if seen[_Flag.PREEMPTED]:
            self._leave_preempted(world, group, listener)
            return True
        if seen[_Flag.EMPTY]:
            raise LoaderError(
                f"lockstep(uneven='pad') repeats batches of ranks that run out, but a rank has none at all: "
                f"rank {world.placement.rank} of {world.placement.world_size} was told so. Use uneven='shortest'."
            )
        if seen[_Flag.STOP]:
            return True
        if self._uneven == "pad":
            return not seen[_Flag.HAS]
        if seen[_Flag.OUT] and seen[_Flag.HAS]:
            self._note_uneven(world, group)
        return bool(seen[_Flag.OUT])

    def _leave_preempted(self, world: World, group: Any, listener: Listener) -> None:
        run = world.part(LockstepRun)
        if run.preempted is None:
            self.preempted = run.preempted = _first_heard(listener, group, world, self.step, self._grace)
            say(str(self.preempted))
            if self._on_preempt is not None:
                self._on_preempt(self.preempted)
        self.preempted = run.preempted

    def _note_uneven(self, world: World, group: Any) -> None:
        """Say once a run which ranks had more data than others."""
        if not is_first_time("uneven"):
            return
        lengths = _gathered([self._has_more], group)
        out = [rank for rank, (more,) in enumerate(lengths) if not more]
        say(
            f"lockstep ended after step {self.step}, when {named_ranks(out)} ran out of data and the others had more; "
            f"uneven='pad' would use it"
        )

    def _vote_to_stop(self, group: Any, world: World) -> None:
        """On leaving the loop alone: the others find it before their next step. Nothing waits here."""
        if group is None or current_world() is not world or not dist.is_initialized():
            return
        mine = [0] * len(_Flag)
        mine[_Flag.STOP] = 1
        status = torch.tensor(mine, dtype=torch.int32)
        self._vote = status, dist.all_reduce(status, op=dist.ReduceOp.MAX, group=group, async_op=True)


def _status_group(world: World) -> Any:
    """A group of the CPUs for the status alone, so that a vote never meets another collective; ``None`` for one."""
    if world.placement.world_size == 1:
        return None
    require_group("lockstep")
    run = world.part(LockstepRun)
    if run.group is None:
        run.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))
    return run.group


def _gathered(mine: list[int], group: Any) -> list[list[int]]:
    if group is None:
        return [mine]
    everyone = [torch.zeros(len(mine), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor(mine, dtype=torch.int64), group=group)
    return [row.tolist() for row in everyone]


def _first_heard(listener: Listener, group: Any, world: World, step: int, grace: float) -> Preemption:
    number, moment = listener.heard or (0, 0.0)
    heard = _gathered([number, int(moment * 1000)], group)
    milliseconds, rank, number = min((when, rank, sent) for rank, (sent, when) in enumerate(heard) if sent)
    return Preemption(number, rank, step, milliseconds / 1000 + grace)
