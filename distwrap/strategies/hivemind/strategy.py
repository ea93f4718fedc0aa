"""``strategy="hivemind"``: peers that train one model together, and may come and go; extra ``hivemind``.

Each rank is a peer. It sums its gradients until all peers together have `target_batch_size` samples. Then the present
peers find each other and average the gradients, and each steps its own optimizer. hivemind calls this an epoch, and
distwrap a global step.
Source: https://learning-at-home.readthedocs.io/en/latest/modules/optim.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.checks import SECONDS, Check, either, one_of, whole
from distwrap.comm.base import option
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import World, current_world
from distwrap.model.distributed import LocalModel, LocalRouting
from distwrap.model.transparent import unwrap_model
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.base import Strategy, Wrapping, take_rank_zero_weights
from distwrap.strategies.hivemind.optimizer import COMPRESSIONS, PeerSteps
from distwrap.strategies.hivemind.together import Collaborations
from distwrap.strategies.optimizer_scope import refuse_sparse

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
        if wrapping.in_precision.make_scaler() is not None:
            raise OptionError("strategy='hivemind' has no fp16, in which each peer would scale its losses on its own.")
        net = unwrap_model(model)
        for name, parameter in net.named_parameters():
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"the parameter {name!r} is in {parameter.dtype}, and peers of hivemind average in float32: it "
                    f"would be rounded. Use model.float(), with precision='bf16' to compute in half precision."
                )
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
