"""Results of hivemind's rounds of averaging, which hivemind only writes to its log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from distwrap.errors import CollectiveError
from distwrap.group.world import World, say
from distwrap.strategies.hivemind.options import HivemindOptions
from distwrap.strategies.hivemind.peers import Peers
from distwrap.strategies.hivemind.user_optimizer import UserOptimizer
from distwrap.wording import first_line, named_ranks

_MISSES = 3  # global steps in a row without all ranks of this run, or without any peer
_STRANGERS_SECONDS = 75.0  # after which a killed peer of another run is forgotten
_LEAST = 1e-6  # weight of a peer without samples
_CLOSE_SECONDS = 10.0


class Rounds:
    """Rounds of one of hivemind's optimizers, observed from outside.

    Attributes:
        own_samples: the samples of this rank in the last global step.
    """

    def __init__(
        self, hivemind: Any, users: UserOptimizer, peers: Peers, world: World, options: HivemindOptions
    ) -> None:
        self._hivemind, self._options, self._users = hivemind, options, users
        self._peers, self._world = peers, world
        self._gradients: Any = None
        self._state: Any = None
        self._state_due = self._caught_up = False
        self._misses, self._missed_seconds = 0, 0.0
        self._size = 0
        self.own_samples = 0
        self._observe()

    def begin(self) -> None:
        """Forget the rounds of earlier steps."""
        self._gradients = self._state = None
        self._state_due = self._caught_up = False

    def check_alive(self, here: str) -> None:
        """Refuse to step if one of hivemind's processes has ended, for which hivemind would wait for ever."""
        for name, process in {"peers": self._hivemind.dht, **self._processes()}.items():
            if not process.is_alive():
                raise CollectiveError(
                    f"{here}: hivemind's process for {name} has ended (exit code {process.exitcode}). Was it "
                    "killed, or did memory run out? Start the run again; with initial_peers= it takes over the "
                    "weights of its peers."
                )

    def judge(self, epoch: int, seconds: float, difference: Callable[[], str]) -> None:
        """Check the rounds of a global step.

        Args:
            epoch: the number of the step.
            seconds: the duration of the step.
            difference: checks weights that all ranks have averaged, and returns a description of a problem.

        Raises:
            CollectiveError: several in a row lacked other ranks or any peer, or lost a part.
        """
        here, is_alone = self._peers.here, self._world.placement.world_size == 1
        if self._caught_up:
            say(f"hivemind: {here} was behind, and took a peer's weights, after global step {epoch}", every_rank=True)
            return
        problems = [] if self._options.local_updates else self._problem(self._gradients, "gradients")
        if self._state_due:
            problems += self._problem(self._state, "weights")
            if not problems and (found := difference()):
                problems = [found]
        if not problems:
            self._misses, self._missed_seconds = 0, 0.0
            return
        self._misses, self._missed_seconds = self._misses + 1, self._missed_seconds + seconds
        text = f"{here}: in global step {epoch} {' and '.join(problems)}"
        if self._misses >= _MISSES and (not is_alone or self._missed_seconds > _STRANGERS_SECONDS):
            raise CollectiveError(
                f"{text}, as in {self._misses} such steps in a row. The peers train apart. Do all ranks still call "
                f"step()? Do all peers have the same model, and target_batch_size? Is a step of one of them longer "
                f"than averaging_seconds={self._options.averaging_seconds:g}, or the network slow? Then make that, and "
                f"matchmaking_seconds={self._options.matchmaking_seconds:g}, larger."
            )
        say(f"hivemind: {text}; the next steps bring them together again, or the run ends", every_rank=True)

    def close(self) -> None:
        """End hivemind's optimizer and its processes, and kill those that do not end."""
        for scheduled in (self._hivemind.scheduled_grads, self._hivemind.scheduled_state):
            if scheduled is not None and not scheduled.done():
                with contextlib.suppress(Exception):
                    scheduled.cancel()
        with contextlib.suppress(Exception):
            self._hivemind.shutdown()
        for process in self._processes().values():
            if process.is_alive():
                process.kill()
            process.join(_CLOSE_SECONDS)

    def _processes(self) -> dict[str, Any]:
        averagers = {"gradients": self._hivemind.grad_averager, "weights": self._hivemind.state_averager}
        return {f"the mean of {name}": each for name, each in averagers.items() if each is not None}

    def _problem(self, control: Any, what: str) -> list[str]:
        """Return descriptions of a round's problems."""
        peers, others = self._peers, self._world.placement.world_size > 1
        if control is None:
            return [f"{what} were not averaged: no other peer is there"] if others else []
        try:
            group = {str(peer) for peer in control.result(0)}
        except BaseException as error:  # noqa: BLE001 - cancelled, timed out, or any error of hivemind
            words = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
            return [f"{what} were not averaged ({words})"]
        if len(group) != self._size:
            self._size = len(group)
            strangers = len(group - set(peers.ids))
            say(f"hivemind: {len(group)} peers average now, {strangers} of them of other runs")
        missing = [rank for rank, peer in enumerate(peers.ids) if peer not in group]
        return [f"{what} were averaged without {named_ranks(missing)}"] if missing else []

    def _observe(self) -> None:
        """Observe the calls of hivemind's optimizer to its averagers, by replacing methods of these objects."""
        gradients, state = self._hivemind.grad_averager, self._hivemind.state_averager
        if gradients is not None:
            self._observe_gradients(gradients)
        step, load = state.step, state.load_state_from_peers

        def state_step(**how: Any) -> Any:
            if how.get("averaging_round"):
                control = how.get("averaging_control")
                if control is None or control.triggered or control.done():
                    limit = self._options.averaging_seconds
                    control = how["averaging_control"] = state.schedule_step(
                        gather=self._hivemind.local_epoch, timeout=limit
                    )
                self._state, self._state_due = control, True
            return step(**how)

        def state_load(**how: Any) -> None:
            before = self._hivemind.local_epoch
            with contextlib.suppress(Exception):  # hivemind would retry for ever; the next step does so
                self._users.taking_over(load, **how)
            self._caught_up = self._hivemind.local_epoch != before

        state.step, state.load_state_from_peers = state_step, state_load

    def _observe_gradients(self, gradients: Any) -> None:
        step: Callable[..., Any] = gradients.step
        accumulate: Callable[[int], None] = gradients.accumulate_grads_

        def gradients_step(*args: Any, **how: Any) -> Any:
            self.own_samples = gradients.local_samples_accumulated
            self._gradients = None
            # Not 0 if this rank only helps: with only such ranks the mean would be 0 / 0.
            self._gradients = step(*args, **{"weight": max(self.own_samples, _LEAST), **how})
            return self._gradients

        def accumulate_grads(batch_size: int) -> None:
            if batch_size:  # 0 if this rank only helps the others
                accumulate(batch_size)

        gradients.step, gradients.accumulate_grads_ = gradients_step, accumulate_grads
        gradients.load_state_from_peers = lambda **how: None  # a peer's gradients are of no use
