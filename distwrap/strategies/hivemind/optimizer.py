"""hivemind's optimizer around the user's: its step counts samples, and sometimes is a global step.

If a round of averaging fails, hivemind continues with a rank's own gradients, and only its log shows it. So each global
step is checked: how many peers it had, whether the other ranks of this run took part, and how many samples it took.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import mark_steps_as_watched
from distwrap.devices.kinds import widest
from distwrap.errors import CollectiveError, LaunchError, ModelError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import World, is_first_time, say
from distwrap.model.wrapped_models import WrappedModels, parameters_of
from distwrap.strategies.hivemind.peers import Peers, forking
from distwrap.strategies.optimizer_scope import refuse_whole
from distwrap.strategies.windows import Windows
from distwrap.wording import first_line, named_ranks

COMPRESSIONS = {"none": "NoCompression", "fp16": "Float16Compression", "8bit": "Uniform8BitQuantization"}
_REFRESH = {"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 2.0}
_PROGRESS_SECONDS = 30.0  # for which a killed peer still counts
_LOOK_SECONDS = 0.05
_CLOSE_SECONDS = 10.0
_MISSES = 3  # global steps in a row without all ranks of this run
_LEAST = 1e-6  # weight of a peer without samples: with only such peers the mean would be 0 / 0
_ALIKE = 1e-4  # of the norm: the largest rounding error of averaged weights


class UsersOptimizer(Optimizer):
    """The user's optimizer as hivemind steps it.

    hivemind only logs what a step raises; and it loads a state into the layout of the present one, which an optimizer
    does not have before its first step: so the state travels as one tensor.

    Attributes:
        user: the user's optimizer.
        error: the exception of its step, or of a state that it was to load.
        steps: the number of steps taken.
        loads: the number of loaded states of peers.
        in_step: whether a step is running.
        touched: the ids of the parameters that had a gradient on this rank since the last global step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.user = optimizer
        self.error: BaseException | None = None
        self.steps = self.loads = 0
        self.in_step = False
        self.touched: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["user"], name)  # groups, state, defaults, hooks

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with the gradients that hivemind has stored; runs in a thread of hivemind's."""
        for number, parameter in parameters_of(self.user).items():
            # hivemind gives zeros where there is no gradient, with which weight decay and momentum would act.
            is_zero = parameter.grad is None or not parameter.grad.any()
            if not parameter.requires_grad or (is_zero and number not in self.touched):
                parameter.grad = None
        self.in_step = True
        try:
            self.user.step()
            self.steps += 1
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.in_step = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer as one tensor of bytes."""
        written = io.BytesIO()
        torch.save(self.user.state_dict(), written)
        return {"state": torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a peer's state; hivemind would try for ever if that raised."""
        try:
            self.user.load_state_dict(torch.load(io.BytesIO(state_dict["state"].numpy().tobytes()), weights_only=True))
            self.loads += 1
        except Exception as error:  # noqa: BLE001 - raised when hivemind has returned
            self.error = error


class RoundOfGradients:
    """What hivemind's ``GradientAverager`` does besides: note each round, with the weight of this rank."""

    latest: Any = None  # hivemind's control of it

    def step(self, *args: Any, **how: Any) -> Any:
        """Begin a round."""
        samples = max(self.local_samples_accumulated, _LEAST)  # type: ignore[attr-defined]
        self.latest = super().step(*args, **{"weight": samples, **how})  # type: ignore[misc]
        return self.latest

    def accumulate_grads_(self, batch_size: int) -> None:
        """Add gradients, unless this rank only helps the others."""
        if batch_size:
            super().accumulate_grads_(batch_size)  # type: ignore[misc]

    def load_state_from_peers(self, **how: Any) -> None:
        """Load nothing: a peer's gradients are of no use."""


class PeerSteps:
    """What hivemind's ``Optimizer`` does besides, of which it is the second parent.

    Attributes:
        user: the user's optimizer, whose groups, state and hooks are those of this one.
        key: hivemind's name of this training.
        target: the samples of all peers in a global step.
        users: the user's optimizer as hivemind steps it.
        samples: the samples of this rank since the start.
        here: a name of this rank, for messages.
        is_over: whether the run has ended, after which it steps as the user's.
    """

    local_epoch: int  # hivemind's number of global steps
    tracker: Any
    state_averager: Any
    grad_averager: Any

    def __init__(self, optimizer: Optimizer, world: World, options: Any, number: int) -> None:
        self.user, self.is_over = optimizer, False
        self._world, self._options, self._peers = world, options, world.part(Peers)
        self.key = options.run_id if number == 1 else f"{options.run_id}_{number}"
        self.target, self.parameters = options.target(world.placement.world_size), [*parameters_of(optimizer).values()]
        self.users, self.here = UsersOptimizer(optimizer), self._peers.here
        self._misses, self._size, self._given, self.samples = 0, 0, 0, 0
        refuse_whole(optimizer)
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"{self.here}: wrap_optimizer() got a parameter in {parameter.dtype}, and peers of hivemind "
                    f"average in float32: it would be rounded. Use model.float()."
                )
        shapes = [list(parameter.shape) for parameter in self.parameters[:20]]
        self._peers.meet_members(self.key, [self.target, str(shapes)])
        joins, is_first = bool(options.initial_peers), world.placement.rank == 0
        if joins and not is_first:
            broadcast(None)  # only then has rank 0 taken the weights of a peer, and not of another rank
        with self._gradients_kept(), forking():
            self._make(options)
        if joins and is_first:
            self._take_over()
            broadcast(None)
        with torch.no_grad():
            for own in self.tensors():
                own.copy_(broadcast(own))
        state, epoch = broadcast((optimizer.state_dict()["state"], self.local_epoch) if joins else ({}, 0))
        if joins and not is_first:
            self.take_position(state, epoch)
        self._see_others()
        mark_steps_as_watched(optimizer)  # a scheduler of it counts local steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["user"], name)  # defaults, hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the user's optimizer, in which schedulers change rates."""
        return self.user.param_groups

    @property
    def state(self) -> Any:
        """The state of the user's optimizer."""
        return self.user.state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer, as in one process."""
        return self.user.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the user's optimizer."""
        self.user.load_state_dict(state_dict)

    @property
    def is_due(self) -> bool:
        """Whether hivemind would begin a global step, and a peer has samples for it."""
        return bool(self.tracker.ready_to_update_epoch) and self.tracker.global_progress.samples_accumulated > 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count the samples of a step; if all peers have enough, average and step."""
        if self.is_over:
            return self.user.step(closure)
        self._world.part(Windows).refuse_half(self.user)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        touched = {id(each) for each in self.parameters if each.grad is not None}
        if touched:  # else nothing happens, as in any optimizer without gradients
            self.users.touched |= touched
            self.samples += self._options.samples()
            with self._gradients_kept(only=touched):
                self._go_on(self._options.samples())
        return loss

    def assist(self) -> None:
        """Take part in a due round without samples of this rank."""
        if self.is_due:
            with self._gradients_kept():
                for parameter in self.parameters:
                    parameter.grad = None  # with local updates each step changes the weights
                self._go_on(0)

    def load_state_from_peers(self, **how: Any) -> None:
        """Take a peer's weights, optimizer state and count of global steps.

        Raises:
            Exception: the user's optimizer cannot load the state.
        """
        super().load_state_from_peers(**how)  # type: ignore[misc]
        self._raise_error()

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights and buffers that peers average."""
        return [each.data for each in (*self.parameters, *self._buffers())]

    def take_position(self, state: dict[str, Any], epoch: int) -> None:
        """Load a peer's optimizer state and count of global steps; its weights are already here."""
        self.user.load_state_dict({**self.user.state_dict(), "state": state})
        self.state_averager.local_epoch = epoch
        self.tracker.report_local_progress(epoch, samples_accumulated=0)

    def close(self) -> None:
        """End hivemind's processes."""
        if self.is_over:
            return
        self.is_over = True
        with contextlib.suppress(Exception):
            self.shutdown()
        for process in self._processes().values():
            process.kill()
            process.join(_CLOSE_SECONDS)

    def _make(self, options: Any) -> None:
        """Make hivemind's optimizer, which starts its processes."""
        from hivemind import compression
        from hivemind.optim.grad_averager import GradientAverager

        # This must be shorter than the time in which a peer looks for others, or they may wait for each other.
        request = min(3.0, options.matchmaking_seconds * 0.6)
        gradients = type("RoundOfGradients", (RoundOfGradients, GradientAverager), {})
        super().__init__(  # type: ignore[call-arg]
            dht=self._peers.dht,
            run_id=self.key,
            target_batch_size=self.target,
            batch_size_per_step=options.samples(),
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
            grad_compression=getattr(compression, COMPRESSIONS[options.compression])(),
            grad_averager_factory=None
            if options.local_updates
            else functools.partial(gradients, request_timeout=request),
        )

    @contextlib.contextmanager
    def _gradients_kept(self, only: set[int] | None = None) -> Any:
        """Restore gradients after a ``with``; or, given the ids of those that there are, remove the others."""
        before = [each.grad for each in self.parameters]
        yield
        for parameter, gradient in zip(self.parameters, before, strict=True):
            if only is None or id(parameter) not in only:
                parameter.grad = gradient

    def _buffers(self) -> list[torch.Tensor]:
        models = self._world.part(WrappedModels).of_optimizer(self.user)
        return [buffer for model in models for buffer in model.buffers() if buffer.dtype == torch.float32]

    def _processes(self) -> dict[str, Any]:
        processes = {"gradients": self.grad_averager, "weights": self.state_averager}
        return {f"the mean of {name}": each for name, each in processes.items() if each is not None}

    def _raise_error(self) -> None:
        error, self.users.error = self.users.error, None
        if error is not None:
            raise error

    # The start

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
                    f"weights. Do the peers at initial_peers= still train run_id={self._options.run_id!r}?"
                )
            self.load_state_from_peers()
            time.sleep(_LOOK_SECONDS)
        say(f"hivemind: took the weights, and the optimizer's state, of a peer after global step {self.local_epoch}")

    def _see_others(self) -> None:
        """Wait until each rank counts the others: hivemind learns of a peer with its first step or later.

        Raises:
            LaunchError: a rank does not; raised on all ranks.
        """
        size, tracker = self._world.placement.world_size, self.tracker
        deadline = time.monotonic() + self._options.peer_seconds
        tracker.report_local_progress(self.local_epoch, samples_accumulated=1)  # zero samples are not reported
        while (count := tracker.global_progress.num_peers) < size and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        counts = gather_object(count)
        tracker.report_local_progress(self.local_epoch, samples_accumulated=0)
        if size > 1 and min(counts) < size:
            told = "; ".join(f"rank {rank} sees {count}" for rank, count in enumerate(counts) if count < size)
            raise LaunchError(
                f"{self.here}: after peer_seconds={self._options.peer_seconds:g} not every rank sees all {size} peers "
                f"of this run: {told}. They would train apart. Does a firewall block ports between them? Do the "
                "clocks of the nodes differ by more than 3 s? Otherwise raise peer_seconds."
            )

    # A global step

    def _go_on(self, batch_size: int) -> None:
        for name, process in {"peers": self._peers.dht, **self._processes()}.items():
            if not process.is_alive():  # hivemind would wait for it for ever
                raise CollectiveError(
                    f"{self.here}: hivemind's process for {name} has ended (exit code {process.exitcode}). Was it "
                    "killed, or did memory run out? Start the run again; with initial_peers= it takes over the "
                    "weights of its peers."
                )
        before, users = self.local_epoch, self.users
        steps, loads = users.steps, users.loads
        if self.grad_averager is not None:
            self.grad_averager.latest = None
        self._given += batch_size
        super().step(batch_size=batch_size)  # type: ignore[misc]
        self._raise_error()
        if self.local_epoch != before:
            if users.loads > loads:
                say(
                    f"hivemind: {self.here} was behind, and took a peer's weights, after global step "
                    f"{self.local_epoch}",
                    every_rank=True,
                )
            else:
                self._judge(users.steps > steps)
            self._given = 0
            users.touched.clear()

    def _judge(self, has_stepped: bool) -> None:
        """Check a global step.

        Raises:
            CollectiveError: several in a row lacked other ranks or any peer, or lost a part.
        """
        options, epoch = self._options, self.local_epoch
        problem = "" if options.local_updates else self._problem(has_stepped)
        problem = self._compare(is_averaged=epoch % options.average_state_every == 0) or problem
        if not problem:
            self._misses = 0
            return
        self._misses += 1
        text = f"{self.here}: in global step {epoch} {problem}"
        if self._misses >= _MISSES and self._world.placement.world_size > 1:  # others may go, and are forgotten
            raise CollectiveError(
                f"{text}, as in {self._misses} such steps in a row. The peers train apart. Do all ranks still call "
                f"step()? Do all peers have the same model, and target_batch_size? Is a step of one of them longer "
                f"than averaging_seconds={options.averaging_seconds:g}, or the network slow? Then make that, and "
                f"matchmaking_seconds={options.matchmaking_seconds:g}, larger."
            )
        say(f"hivemind: {text}; the next steps bring them together again, or the run ends", every_rank=True)

    def _problem(self, has_stepped: bool) -> str:
        """Return what went wrong with the mean of gradients; empty if nothing did."""
        ids, control = self._peers.ids, self.grad_averager.latest
        if not has_stepped:
            return "this rank took no step: it was behind, and no peer gave its weights"
        if control is None:
            return "gradients were not averaged: no other peer is there" if len(ids) > 1 else ""
        try:
            group = {str(peer) for peer in control.result(0)}
        except BaseException as error:  # noqa: BLE001 - cancelled, timed out, or any error of hivemind
            words = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
            return f"gradients were not averaged ({words})"
        if len(group) != self._size:
            self._size = len(group)
            say(f"hivemind: {len(group)} peers average now, {len(group - set(ids))} of them of other runs")
        missing = [rank for rank, peer in enumerate(ids) if peer not in group]
        return f"gradients were averaged without {named_ranks(missing)}" if missing else ""

    def _compare(self, *, is_averaged: bool) -> str:
        """Compare a global step with that of other ranks, of which the last one finds all; return what is wrong.

        hivemind takes a step with more samples than its target where ranks have not heard of each other's in time, and
        silently leaves lost parts out of a mean.
        """
        channel, place, name = self._world.channel, self._world.placement, f"hivemind step {self.key}"
        norm, mixed = self._digest() if is_averaged else (0.0, 0.0)
        found = {place.rank: [self.local_epoch, self._given, norm, mixed]}
        if channel is not None and place.world_size > 1:
            channel.note(name, json.dumps(found[place.rank]))
            others = set(range(place.world_size)) - {place.rank}
            found |= {rank: json.loads(told) for rank in others if (told := channel.noted(name, rank))}
        found = {rank: each for rank, each in found.items() if each[0] == self.local_epoch}
        samples = sum(given for _, given, *_ in found.values())
        if samples > self.target and is_first_time(f"hivemind overshoot {self.key}"):
            say(
                f"hivemind: global step {self.local_epoch} took {samples} samples of this run, and "
                f"target_batch_size is {self.target}: peers take further local steps before they hear that there are "
                "enough. So there are fewer global steps, over larger batches, than you may count on. Take a "
                "target_batch_size of many local steps; global_steps(optimizer) counts.",
                every_rank=True,
            )
        for rank, (*_, other, others_mixed) in found.items():
            if max(abs(other - norm), abs(others_mixed - mixed)) > _ALIKE * max(norm, 1e-12):
                return (
                    f"the weights, which all ranks averaged, have the norm {norm:.7g} here and {other:.7g} on rank "
                    f"{rank}: a part was lost on the way, or changed by hand since"
                )
        return ""

    def _digest(self) -> tuple[float, float]:
        """Return the norm of all weights, and a sum of them that is no larger, in which a part's place counts."""
        square = mixed = 0.0
        for number, weight in enumerate(self.parameters):
            wide = weight.detach().to(widest(weight.device)).flatten()
            square += float(wide.square().sum())
            mixed += float((wide[::2].sum() - wide[1::3].sum()) / max(1, wide.numel()) ** 0.5) / (number + 1)
        return float(square**0.5), mixed
