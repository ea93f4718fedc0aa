"""``strategy="hivemind"``: peers that train one model together, and may come and go; extra ``hivemind``.

Each rank is a peer. It sums its gradients until all peers together have `target_batch_size` samples. Then the present
peers find each other and average the gradients, and each steps its own optimizer. hivemind calls this an epoch, and
distwrap a global step.
Source: https://learning-at-home.readthedocs.io/en/latest/modules/optim.html
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap.checks import SECONDS, Check, either, one_of, whole
from distwrap.comm.base import option
from distwrap.errors import CollectiveTimeoutError, ModelError, OptionError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World, current_world, say_once
from distwrap.model.distributed import LocalModel, LocalRouting
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels, bound_strategy
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.base import Strategy, Wrapping, take_rank_zero_weights
from distwrap.strategies.hivemind.optimizer import COMPRESSIONS, PeerSteps
from distwrap.strategies.hivemind.peers import Peers
from distwrap.strategies.optimizer_scope import refuse_sparse
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


_PRECISIONS = ("32", "bf16")
_YES_OR_NO = Check("True or False", lambda value: isinstance(value, bool))
_RUN_ID = Check(
    "a word without a dot, the same for all that train together",
    lambda value: isinstance(value, str) and value.strip() != "" and "." not in value,
)
_ADDRESS = Check(
    "'auto', 'loopback', or an address of this node, as '0.0.0.0' for all of them",
    lambda value: isinstance(value, str) and (value in ("auto", "loopback") or value.count(".") == 3),
)
_PEERS = Check(
    "a list of addresses of peers, as another run prints them: ['/ip4/10.0.0.1/tcp/41001/p2p/12D3KooW…']",
    lambda value: not isinstance(value, str) and all("/p2p/" in str(each) for each in value),
    lambda value: tuple(map(str, value)),
)


@dataclass(kw_only=True, eq=False, repr=False)
class HivemindStrategy(Strategy):
    """Strategy of peers that average gradients and weights with hivemind.

    Args:
        target_batch_size: samples of all peers after which the weights change; by default those of one step of each
            rank of this run. All peers must give the same number.
        batch_size: samples of one step of one rank, by which it is counted and weighted; those of a whole window if the
            loop accumulates.
        run_id: the name of the training; another run takes part if it has the same name, and can reach this one.
        initial_peers: addresses of peers of another run, which that run prints; this run joins it.
        compression: the compression of sent gradients: ``"none"``, ``"fp16"`` or ``"8bit"``. Weights are sent in full.
        average_state_every: global steps between two averages of weights, which bring peers together again that have
            missed a round.
        local_updates: whether each step of a rank changes its weights by its own gradients, and a global step averages
            only weights.
        matchmaking_seconds: seconds in which a peer looks for others before each round.
        averaging_seconds: the time limit of a round, after which a peer goes on with its own gradients.
        client_mode: whether to accept no connections, as behind a firewall.
        peer_seconds: seconds within which each rank must see the others.
        host: the address at which peers listen: ``"loopback"``, an address of this node, or ``"0.0.0.0"`` for all of
            them; by default loopback if the run has one node and no initial peers.
        verbose: whether to print hivemind's own log.

    Raises:
        OptionError: an argument has a wrong value, or two contradict each other.

    Example:
        >>> HivemindStrategy(target_batch_size=64, batch_size=16).run_id
        'distwrap'
    """

    same_weights = False
    is_simulated = False
    exchanges = "hivemind exchanges by itself"

    target_batch_size: int | None = option(None, either(None, whole(1)))
    batch_size: int | None = option(None, either(None, whole(1)))
    run_id: str = option("distwrap", _RUN_ID)
    initial_peers: Sequence[str] = option((), _PEERS)
    compression: Literal["none", "fp16", "8bit"] = option("none", one_of("compression", COMPRESSIONS))
    average_state_every: int = option(1, whole(1))
    local_updates: bool = option(False, _YES_OR_NO)
    matchmaking_seconds: float = option(3.0, SECONDS)
    averaging_seconds: float = option(60.0, SECONDS)
    client_mode: bool = option(False, _YES_OR_NO)
    peer_seconds: float = option(30.0, SECONDS)
    host: str = option("auto", _ADDRESS)
    verbose: bool = option(False, _YES_OR_NO)

    def __post_init__(self) -> None:
        for each in fields(self):
            try:
                setattr(self, each.name, each.metadata["check"](each.name, getattr(self, each.name)))
            except OptionError as error:
                raise OptionError(f"HivemindStrategy: {error}") from None
        if None not in (self.target_batch_size, self.batch_size) and self.target_batch_size < self.batch_size:  # type: ignore[operator]
            raise OptionError(
                f"HivemindStrategy(target_batch_size={self.target_batch_size}, batch_size={self.batch_size}): the "
                f"first is in samples over all peers, the second in samples of one step of one rank, so it cannot be "
                f"the larger one."
            )
        if self.averaging_seconds <= self.matchmaking_seconds:
            raise OptionError(
                f"HivemindStrategy(averaging_seconds={self.averaging_seconds:g}): it is the limit of a whole round, "
                f"and looking for peers alone takes matchmaking_seconds={self.matchmaking_seconds:g} of it. Make it "
                f"longer."
            )
        if self.client_mode and not self.initial_peers:
            raise OptionError(
                "HivemindStrategy(client_mode=True): a client takes no connections, so it needs others to connect to: "
                "give initial_peers=[…], as a run without client_mode prints them."
            )
        if self.initial_peers and self.target_batch_size is None:
            raise OptionError(
                "HivemindStrategy(initial_peers=[…]): give target_batch_size too, the same as the peers have. Its "
                "default is one step of each rank of this run alone."
            )

    def samples(self) -> int:
        """Return the number of samples of a step.

        Raises:
            OptionError: `batch_size` was not given.
        """
        if self.batch_size is None:
            raise OptionError(
                "strategy='hivemind' counts samples, and must be told how many a step has. Write "
                "strategy='hivemind(target_batch_size=64, batch_size=16)': batch_size is the number of samples "
                "of one step of one rank, and target_batch_size that of all peers after which the weights change."
            )
        return self.batch_size

    def target(self, world_size: int) -> int:
        """Return the samples of all peers after which the weights change; by default one step of each rank."""
        return self.target_batch_size or self.samples() * world_size

    def check(self, run: Options) -> None:
        require_package("hivemind", "strategy='hivemind'", "comm='local_sgd' or 'diloco', which need none")
        self.samples()
        super().check(run)
        if isinstance(run.precision, str) and run.precision not in _PRECISIONS:
            raise OptionError(
                f"strategy='hivemind' has the precisions '32' and 'bf16', but not {run.precision!r}: peers "
                "average weights in float32, and each would scale its losses, and skip steps, on its own."
            )

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        self.refuse_options(wrapping)
        net = unwrap_model(model)
        refuse_sparse(net, "strategy='hivemind'")
        world.part(Collaborations)  # refuses steps that would not be averaged
        if world.placement.world_size > 1:
            take_rank_zero_weights(net)
        return LocalModel(LocalRouting(model, wrapping.in_precision, wrapping.forward_methods))

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Any:
        """Return hivemind's optimizer around the user's, which has its groups and its state."""
        return current_world().part(Collaborations).made(optimizer, self)

    def step(self, optimizer: Optimizer) -> bool | None:
        """Step an optimizer, and return whether the weights changed, so that a scheduler counts global steps."""
        before = optimizer.users.steps if isinstance(optimizer, PeerSteps) else -1
        optimizer.step()
        return not isinstance(optimizer, PeerSteps) or optimizer.users.steps > before

    def consolidate(self, model: nn.Module) -> None:
        """Give every rank the newest weights, when all ranks are here and due rounds are averaged."""
        current_world().part(Collaborations).consolidate(unwrap_model(model))


def global_steps(optimizer: Optimizer) -> int:
    """Return how many global steps an optimizer has taken with its peers; 0 without peers.

    Use it to count a schedule or a training, since peers take local steps at different rates.

    Example:
        >>> global_steps(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        0
    """
    return int(optimizer.local_epoch) if isinstance(optimizer, PeerSteps) else 0
