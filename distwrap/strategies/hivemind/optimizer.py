"""Optimizer of the user's that steps with peers: its step counts samples, and sometimes is a global step.

If a round of averaging fails, hivemind continues with a rank's own gradients, and only its log shows it. So each round
is checked: how many peers it had, and whether the other ranks of this run took part.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import mark_steps_as_watched
from distwrap.errors import LaunchError, ModelError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World, current_world, say, say_once
from distwrap.model.wrapped_models import WrappedModels, bound_strategy, parameters_of
from distwrap.strategies.hivemind.daemons import forking
from distwrap.strategies.hivemind.options import COMPRESSIONS, HivemindOptions
from distwrap.strategies.hivemind.peers import Peers
from distwrap.strategies.hivemind.rounds import Rounds
from distwrap.strategies.hivemind.together import bring_together, difference
from distwrap.strategies.hivemind.user_optimizer import UserOptimizer
from distwrap.strategies.optimizer_share import refuse_whole
from distwrap.strategies.windows import Windows

_REFRESH = {"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 2.0}
_PROGRESS_SECONDS = 30.0  # for which a killed peer still counts
_LOOK_SECONDS = 0.05
_OVERSHOOT = 2.0  # times the target, above which a line is printed


class Collaboration:
    """Optimizer of a run with its peers, made by all ranks together.

    Attributes:
        optimizer: the user's optimizer.
        hivemind: hivemind's optimizer around it.
        changes: the number of steps that have changed the weights.
    """

    def __init__(self, optimizer: Optimizer, world: World, options: HivemindOptions, number: int) -> None:
        self.optimizer, self._world, self._options = optimizer, world, options
        self._peers, self.samples = world.part(Peers), 0
        self.key = options.run_id if number == 1 else f"{options.run_id}_{number}"
        self.target, self._batch_size = options.target(world.placement.world_size), options.require_batch_size()
        self._own_step: Callable[..., Any] = optimizer.step
        self._was_replaced = "step" in optimizer.__dict__  # for example by a scheduler
        self.users = UserOptimizer(optimizer, self._own_step)
        self.parameters = list(parameters_of(optimizer).values())
        self._held = parameters_of(optimizer).keys()
        self._check_parameters()
        shapes = [list(parameter.shape) for parameter in self.parameters]
        self._peers.meet_members(self.key, [self.target, str(shapes if len(shapes) < 20 else shapes[:20])])
        self.is_over = False
        place, joins = world.placement, bool(options.initial_peers)
        if joins and place.rank > 0:
            broadcast(None)  # only then has rank 0 taken the weights of a peer, and not of another rank
        self.hivemind = self._made()
        self.rounds = Rounds(self.hivemind, self.users, self._peers, world, options)
        if joins and place.rank == 0:
            self._take_over()
            broadcast(None)
        self._share_start(joins)
        self._see_progress()
        optimizer.step = MethodType(_step_of(self), optimizer)  # type: ignore[method-assign]
        mark_steps_as_watched(optimizer)

    @property
    def changes(self) -> int:
        """The number of steps that have changed the weights."""
        return self.users.steps

    @property
    def here(self) -> str:
        """A name of this rank, for messages."""
        return self._peers.here

    @property
    def pending(self) -> int:
        """The number of samples of this rank since the last global step."""
        return int(self.hivemind.local_progress.samples_accumulated)

    @property
    def local_updates(self) -> bool:
        """Whether each step changes this rank's weights."""
        return self._options.local_updates

    @property
    def round_seconds(self) -> float:
        """The time limit of a round."""
        return self._options.averaging_seconds

    @property
    def epoch(self) -> int:
        """The number of global steps of this rank, and of the peers whose weights it has taken over."""
        return int(self.hivemind.local_epoch)

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Count the samples of a step; if all peers have enough, average and step."""
        if self.is_over:
            return self._own_step() if closure is None else self._own_step(closure)
        self._world.part(Windows).refuse_half(self.optimizer)
        if parameters_of(self.optimizer).keys() != self._held:
            raise ModelError(
                f"{self.here}: the parameters of this {type(self.optimizer).__name__} have changed since "
                "wrap_optimizer(), and peers average only those of then. Add groups before wrap_optimizer() is called."
            )
        if closure is None and all(parameter.grad is None for parameter in self.parameters):
            return None  # as any optimizer without gradients
        self.samples += self._batch_size
        return self._go_on(closure, self._batch_size)

    def assist(self) -> None:
        """Take part in a due round without samples of this rank."""
        if self.is_due:
            self._go_on(None, 0)

    @property
    def is_due(self) -> bool:
        """Whether hivemind would begin a global step, and a peer has samples for it."""
        tracker = self.hivemind.tracker
        return bool(tracker.ready_to_update_epoch) and tracker.global_progress.samples_accumulated > 0

    def close(self) -> None:
        """End hivemind's processes, and restore the optimizer's own step."""
        if self.is_over:
            return
        self.is_over = True
        self.optimizer.__dict__.pop("step", None)
        if self._was_replaced:
            self.optimizer.__dict__["step"] = self._own_step
        self.rounds.close()

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights and buffers that peers average."""
        return [each.data for each in (*self.parameters, *self._buffers())]

    def take_position(self, state: dict[str, Any], epoch: int) -> None:
        """Load a peer's optimizer state and count of global steps; its weights are already here."""
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.hivemind.state_averager.local_epoch = epoch
        self.hivemind.tracker.report_local_progress(epoch, samples_accumulated=0)

    def _made(self) -> Any:
        import hivemind
        from hivemind import compression
        from hivemind.optim.grad_averager import GradientAverager

        options = self._options
        # This must be shorter than the time in which a peer looks for others, or they may wait for each other.
        request = min(3.0, options.matchmaking_seconds * 0.6)
        how: dict[str, Any] = {}
        if not options.local_updates:
            kind = getattr(compression, COMPRESSIONS[options.compression])
            how["grad_compression"] = kind()
            how["grad_averager_factory"] = functools.partial(GradientAverager, request_timeout=request)
        with forking():
            return hivemind.Optimizer(
                dht=self._peers.dht,
                run_id=self.key,
                target_batch_size=self.target,
                batch_size_per_step=self._batch_size,
                optimizer=self.users,
                matchmaking_time=options.matchmaking_seconds,
                averaging_timeout=options.averaging_seconds,
                load_state_timeout=options.averaging_seconds,
                average_state_every=options.average_state_every,
                use_local_updates=options.local_updates,
                delay_state_averaging=False,  # a delayed mean may overwrite a global step
                averager_opts={"initialize_optimizer": False, "request_timeout": request},
                extra_tensors=self._buffers(),
                tracker_opts={**_REFRESH, "metadata_expiration": _PROGRESS_SECONDS},
                verbose=options.verbose,
                **how,
            )

    def _buffers(self) -> list[torch.Tensor]:
        models = self._world.part(WrappedModels).of_optimizer(self.optimizer)
        return [buffer for model in models for buffer in model.buffers() if buffer.dtype == torch.float32]

    def _check_parameters(self) -> None:
        refuse_whole(self.optimizer)
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"{self.here}: wrap_optimizer() got a parameter in {parameter.dtype}, and peers of hivemind "
                    f"average in float32: it would be rounded. Use model.float()."
                )

    def _take_over(self) -> None:
        """Take a peer's weights before the first step of a run that joins others.

        Raises:
            LaunchError: no peer has given them.
        """
        deadline = time.monotonic() + self._options.averaging_seconds
        while not self.users.loads:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self.here}: no peer has given its weights within "
                    f"averaging_seconds={self._options.averaging_seconds:g}, so this run would train other "
                    f"weights. Do the peers at initial_peers= still train run_id={self._options.run_id!r}, "
                    "with the same kind of optimizer?"
                )
            self.hivemind.load_state_from_peers()
            time.sleep(_REFRESH["min_refresh_period"])
        say(f"hivemind: took the weights, and the optimizer's state, of a peer after global step {self.epoch}")

    def _share_start(self, joins: bool) -> None:
        """Give every rank the weights of rank 0, with optimizer state and count if they are a peer's."""
        with torch.no_grad():
            for own in self.tensors():
                own.copy_(broadcast(own))
        state, epoch = broadcast((self.optimizer.state_dict()["state"], self.epoch) if joins else ({}, 0))
        if joins and self._world.placement.rank > 0:
            self.take_position(state, epoch)

    def _see_progress(self) -> None:
        """Wait until each rank counts the others: hivemind learns of a peer with its first step or later.

        Raises:
            LaunchError: a rank does not; raised on all ranks.
        """
        size, tracker = self._world.placement.world_size, self.hivemind.tracker
        deadline, epoch = time.monotonic() + self._options.peer_seconds, self.epoch
        tracker.report_local_progress(epoch, samples_accumulated=1)  # zero samples are not reported
        while (count := tracker.global_progress.num_peers) < size and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        counts = gather_object(count)
        tracker.report_local_progress(epoch, samples_accumulated=0)
        if size > 1 and min(counts) < size:
            told = ", ".join(f"rank {rank} of {count}" for rank, count in enumerate(counts) if count < size)
            raise LaunchError(
                f"{self.here}: after peer_seconds={self._options.peer_seconds:g} not every rank hears of the "
                f"training of all {size} peers of this run: {told}. They would train apart. Raise "
                "peer_seconds, and compare the clocks of the nodes, which may differ by 3 s at most."
            )

    def _go_on(self, closure: Callable[[], Any] | None, batch_size: int) -> Any:
        rounds = self.rounds
        rounds.check_alive(self.here)
        rounds.begin()
        before, began = self.epoch, time.monotonic()
        loss = self.hivemind.step(closure, batch_size=batch_size)
        error, self.users.error = self.users.error, None
        if error is not None:
            raise error
        if self.epoch != before:
            rounds.judge(self.epoch, time.monotonic() - began, lambda: difference(self, self._world))
            if rounds.own_samples > _OVERSHOOT * self.target:
                say_once(
                    f"hivemind overshoot {self.key}",
                    f"hivemind: one rank alone gave {rounds.own_samples} samples to a global step, and "
                    f"target_batch_size is {self.target}: local steps are faster than peers hear of each other. Take a "
                    f"larger target_batch_size, or expect fewer global steps.",
                )
        return loss


class Collaborations(RunPart):
    """Optimizers of one run that step with peers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._of: WeakKeyDictionary[Optimizer, Collaboration] = WeakKeyDictionary()
        self._made: list[Collaboration] = []
        world.part(OptimizerSteps).listen(Phase.REFUSE, self._refuse_alone)

    def add(self, optimizer: Optimizer, options: HivemindOptions) -> None:
        """Let an optimizer step with peers from now on; every rank calls it, and repeated calls do nothing."""
        if optimizer not in self._of:
            made = Collaboration(optimizer, self._world, options, self._world.count("hivemind optimizer"))
            self._of[optimizer] = made
            self._made.append(made)

    def of(self, optimizer: Optimizer) -> Collaboration | None:
        """Return the collaboration of an optimizer, or ``None``."""
        return self._of.get(optimizer)

    def consolidate(self, net: nn.Module) -> None:
        """Give every rank the newest weights of a model."""
        own = set(map(id, net.parameters()))
        for each in self._made:
            if not own.isdisjoint(map(id, each.parameters)):
                bring_together(each, self._world, take=True)

    def conclude(self) -> None:
        for each in self._made:
            if not each.is_over:
                bring_together(each, self._world, take=False)
        for each in reversed(self._made):
            each.close()
        self._world.part(Peers).close()

    def settle(self) -> None:
        self.conclude()  # needed if none of distwrap's launchers runs the function

    def close(self) -> None:
        for each in reversed(self._made):
            each.close()
        self._made.clear()

    def _refuse_alone(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = self._of.get(optimizer)
        if found is not None:
            if not (found.users.in_step or found.is_over):
                raise ModelError(
                    f"{self._world.part(Peers).here}: this step of {type(optimizer).__name__} would not be "
                    "averaged with its peers. Call optimizer.step() of the object that wrap_optimizer() returned."
                )
            return
        strategy = bound_strategy(optimizer)
        if (
            strategy is not None
            and not strategy.same_weights
            and self._world.part(WrappedModels).of_optimizer(optimizer)
        ):
            raise ModelError(
                f"{self._world.part(Peers).here}: {type(optimizer).__name__} is about to step a model that "
                "trains with peers, without averaging with them: call optimizer = wrap_optimizer(optimizer) "
                "before the first step, on every rank."
            )


def global_steps(optimizer: Optimizer) -> int:
    """Return how many global steps an optimizer has taken with its peers; 0 without peers.

    Use it to count a schedule or a training, since peers take local steps at different rates.

    Example:
        >>> global_steps(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        0
    """
    found = current_world().part(Collaborations).of(optimizer)
    return 0 if found is None else found.epoch


def _step_of(collaboration: Collaboration) -> Callable[..., Any]:
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step with peers."""
        return collaboration.step(closure)

    return step
