"""Optimizers of one run that step with peers, and how its ranks come to the same weights at the end."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap.errors import CollectiveTimeoutError, ModelError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World, say_once
from distwrap.model.wrapped_models import WrappedModels, bound_strategy
from distwrap.strategies.hivemind.optimizer import PeerSteps
from distwrap.strategies.hivemind.peers import Peers
from distwrap.wording import named_ranks

_LOOK_SECONDS = 0.05
_HERE, _AVERAGES, _KNOWS_ALL = "here", "averages", "knows all"  # states of a waiting rank


class Collaborations(RunPart):
    """Optimizers of one run that step with peers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._all: list[Any] = []
        world.part(OptimizerSteps).listen(Phase.REFUSE, self._refuse_alone)

    def made(self, optimizer: Optimizer, options: Any) -> Any:
        """Return hivemind's optimizer around the user's; every rank calls it, and later calls return the same one."""
        for each in self._all:
            if optimizer is each or optimizer is each.user:
                return each
        self._world.part(Peers).start(options)
        import hivemind

        kind = type("PeerOptimizer", (PeerSteps, hivemind.Optimizer), {})
        self._all.append(kind(optimizer, self._world, options, self._world.count("hivemind optimizer")))
        return self._all[-1]

    def consolidate(self, net: nn.Module) -> None:
        """Give every rank the newest weights of a model."""
        own = set(map(id, net.parameters()))
        for each in self._all:
            if not own.isdisjoint(map(id, each.parameters)):
                bring_together(each, self._world, take=True)

    def conclude(self) -> None:
        for each in self._all:
            if not each.is_over:
                bring_together(each, self._world, take=False)
        self.close()
        self._world.part(Peers).close()

    def settle(self) -> None:
        self.conclude()  # needed if none of distwrap's launchers runs the function

    def close(self) -> None:
        for each in reversed(self._all):
            each.close()
        self._all.clear()

    def _refuse_alone(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = next((each for each in self._all if each.user is optimizer), None)
        if found is not None and (found.users.in_step or found.is_over):
            return
        strategy = bound_strategy(optimizer)
        of_model = strategy is not None and not strategy.same_weights
        if found is not None or (of_model and self._world.part(WrappedModels).of_optimizer(optimizer)):
            raise ModelError(
                f"{self._world.part(Peers).here}: this step of {type(optimizer).__name__} would not be averaged with "
                "its peers. Call optimizer = wrap_optimizer(optimizer) before the first step, on every rank, and step "
                "what it returns."
            )


def bring_together(one: Any, world: World, *, take: bool) -> None:
    """Wait for all ranks, averaging with those that still train; then finish the due global step.

    Args:
        one: hivemind's optimizer of this rank, with its `PeerSteps`.
        world: the world of the run.
        take: whether all ranks take the newest weights, those of the first rank that has them.

    Raises:
        CollectiveTimeoutError: not all ranks arrived.
        ModelError: the run ends without a single global step.
    """
    if world.placement.world_size > 1:
        _await_all(one, world)
    epochs, pending = zip(
        *gather_object((one.local_epoch, one.tracker.local_progress.samples_accumulated)), strict=True
    )
    if not take:
        _judge_end(one, max(epochs), sum(pending))
        return
    if len(set(epochs)) == 1 and sum(pending) >= one.target:
        deadline = time.monotonic() + one.averaging_timeout
        while one.local_epoch == epochs[0] and time.monotonic() < deadline:
            one.assist()
            time.sleep(_LOOK_SECONDS)
        epochs = tuple(gather_object(one.local_epoch))
    source = epochs.index(max(epochs))
    with torch.no_grad():
        for own in one.tensors():
            own.copy_(broadcast(own, src=source))
    if len(set(epochs)) > 1:
        state = broadcast(one.state_dict()["state"], src=source)
        if one.local_epoch < epochs[source]:
            one.take_position(state, epochs[source])


def _await_all(one: Any, world: World) -> None:
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


def _judge_end(one: Any, epoch: int, pending: int) -> None:
    """Check for samples that changed no weight when a run ends.

    Raises:
        ModelError: the run has counted samples, but never changed a weight.
    """
    done = "" if pending < one.target else " Call consolidate(model) at the end, which takes the step that is due."
    if one.samples and not one.users.steps and not epoch:
        raise ModelError(
            f"{one.here}: the run ends before its first global step, so nothing was trained: all ranks have "
            f"{pending} samples together, and target_batch_size={one.target}."
            f"{done or ' Give fewer, or train longer.'}"
        )
    if pending and not one.use_local_updates:
        say_once(
            f"hivemind rest {one.key} {epoch}",
            f"hivemind: the last {pending} samples changed nothing: a global step takes {one.target}.{done}",
        )
