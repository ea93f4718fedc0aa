"""Bring the ranks of a run to the same weights, after due rounds with those that still train."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING

import torch

from distwrap.devices.kinds import widest
from distwrap.errors import CollectiveTimeoutError, ModelError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import World, say_once
from distwrap.wording import named_ranks

if TYPE_CHECKING:
    from distwrap.strategies.hivemind.optimizer import Collaboration

_LOOK_SECONDS = 0.05
_HERE, _AVERAGES, _KNOWS_ALL = "here", "averages", "knows all"  # states of a waiting rank
_ALIKE = 1e-4  # of the norm: the largest rounding error of averaged weights


def bring_together(one: Collaboration, world: World, *, take: bool) -> None:
    """Wait for all ranks, averaging with those that still train; then finish the due global step.

    Args:
        one: the collaboration of this rank.
        world: the world of the run.
        take: whether all ranks take the newest weights, those of the first rank that has them.

    Raises:
        CollectiveTimeoutError: not all ranks arrived.
        ModelError: the run ends without a single global step.
    """
    if world.placement.world_size > 1:
        _await_all(one, world)
        epochs, pending = _positions(one)
        if take and len(set(epochs)) == 1 and sum(pending) >= one.target:
            _finish(one)
            epochs, pending = _positions(one)
        newest = max(epochs)
        if take:
            _take(one, world, epochs, epochs.index(newest))
    else:
        epochs, pending = [one.epoch], [one.pending]
    if not take:
        _judge_end(one, max(epochs), sum(pending))


def difference(one: Collaboration, world: World) -> str:
    """Return a text about how just averaged weights differ from another rank's by more than rounding.

    hivemind silently leaves lost parts out of a mean. Of two ranks the later one compares.
    """
    if world.channel is None or world.placement.world_size == 1:
        return ""
    name, mine = f"hivemind weights {one.key}", _digest(one)
    world.channel.note(name, json.dumps([one.epoch, *mine]))
    for rank in range(world.placement.world_size):
        told = world.channel.noted(name, rank) if rank != world.placement.rank else ""
        epoch, *theirs = json.loads(told) if told else (-1,)
        if epoch != one.epoch:
            continue
        if any(abs(a - b) > _ALIKE * max(mine[0], 1e-12) for a, b in zip(mine, theirs, strict=True)):
            return (
                f"the weights, which all ranks averaged, have the norm {mine[0]:.7g} here and {theirs[0]:.7g} on rank "
                f"{rank}: a part was lost on the way, or changed by hand since"
            )
    return ""


def _digest(one: Collaboration) -> list[float]:
    """Return the norm of all weights, and a sum in which each weight's position counts."""
    square = mixed = 0.0
    for number, weight in enumerate(one.parameters):
        wide = weight.detach().flatten().to(widest(weight.device))
        signs = torch.cos(torch.arange(wide.numel(), dtype=wide.dtype, device=wide.device) + number)
        square, mixed = square + float(wide.square().sum()), mixed + float((wide * signs).sum())
    return [math.sqrt(square), mixed]


def _await_all(one: Collaboration, world: World) -> None:
    """Wait until every rank is here, and take part in rounds that others begin meanwhile.

    A rank that knows all ranks to be here begins no more rounds, and joins only those that another rank began before it
    knew. When all know, no rank is in a round.
    """
    channel, place, limit = world.channel, world.placement, world.options.timeout
    if channel is None:
        return  # in a user's group the next collective waits
    name, deadline = f"hivemind {one.key} {world.count(f'hivemind {one.key}')}", time.monotonic() + limit
    state, told = _HERE, dict[int, str]()
    channel.note(name, state)
    while not told or any(each != _KNOWS_ALL for each in (state, *told.values())):
        told = {rank: channel.noted(name, rank) for rank in range(place.world_size) if rank != place.rank}
        if state != _KNOWS_ALL and all(told.values()):
            state = _KNOWS_ALL
            channel.note(name, state)
        if time.monotonic() > deadline:
            missing = [rank for rank, each in told.items() if not each] or list(told)
            raise CollectiveTimeoutError(
                f"{one.here} waited timeout={limit:g} s for {named_ranks(missing)}, to have the same weights "
                "on all ranks, and helped them to average meanwhile. Do they train longer, or never call "
                "consolidate()? Give all ranks equally many steps, or raise timeout=."
            )
        if state == _KNOWS_ALL:
            if _AVERAGES in told.values():
                one.assist()
        elif one.is_due:
            channel.note(name, _AVERAGES)
            one.assist()
            channel.note(name, state)
        time.sleep(_LOOK_SECONDS)


def _positions(one: Collaboration) -> tuple[list[int], list[int]]:
    """Return each rank's number of global steps, and its samples since the last one."""
    everyone = gather_object((one.epoch, one.pending))
    return [epoch for epoch, _ in everyone], [pending for _, pending in everyone]


def _finish(one: Collaboration) -> None:
    """Take the global step for which the ranks together have enough samples; every rank calls it."""
    before, deadline = one.epoch, time.monotonic() + one.round_seconds
    while one.epoch == before and time.monotonic() < deadline:
        one.assist()
        time.sleep(_LOOK_SECONDS)


def _take(one: Collaboration, world: World, epochs: list[int], source: int) -> None:
    """Take a rank's weights, and if this one has missed steps also the optimizer's state and the count."""
    with torch.no_grad():
        for own in one.tensors():
            own.copy_(broadcast(own, src=source))
    if len(set(epochs)) > 1:
        state = broadcast(one.optimizer.state_dict()["state"], src=source)
        if epochs[world.placement.rank] < epochs[source]:
            one.take_position(state, epochs[source])


def _judge_end(one: Collaboration, epoch: int, pending: int) -> None:
    """Check for samples that changed no weight when a run ends.

    Raises:
        ModelError: the run has counted samples, but never changed a weight.
    """
    done = "" if pending < one.target else " Call consolidate(model) at the end, which takes the step that is due."
    if one.samples and not one.changes and not epoch:
        raise ModelError(
            f"{one.here}: the run ends before its first global step, so nothing was trained: all ranks have "
            f"{pending} samples together, and target_batch_size={one.target}."
            f"{done or ' Give fewer, or train longer.'}"
        )
    if pending and not one.local_updates:
        say_once(
            f"hivemind rest {one.key} {epoch}",
            f"hivemind: the last {pending} samples changed nothing: a global step takes {one.target}.{done}",
        )
