"""``strategy="hivemind"``: peers that train one model together, and may come and go; extra ``hivemind``.

Each rank is a peer. It sums its gradients until all peers together have `target_batch_size` samples. Then the present
peers find each other and average the gradients, and each steps its own optimizer. hivemind calls this an epoch, and
distwrap a global step.
Source: https://learning-at-home.readthedocs.io/en/latest/modules/optim.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.errors import ModelError, OptionError
from distwrap.group.setup import require_group
from distwrap.group.world import World, current_world
from distwrap.model.distributed import LocalModel, LocalRouting
from distwrap.model.transparent import unwrap_model
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.base import Strategy, Wrapping, take_rank_zero_weights
from distwrap.strategies.hivemind.optimizer import Collaborations
from distwrap.strategies.hivemind.options import HivemindOptions
from distwrap.strategies.hivemind.peers import Peers
from distwrap.strategies.optimizer_share import refuse_sparse

_PRECISIONS = ("32", "bf16")


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
        >>> HivemindStrategy(target_batch_size=64, batch_size=16).hivemind_options.run_id
        'distwrap'
    """

    same_weights = False

    def __init__(
        self,
        *,
        target_batch_size: int | None = None,
        batch_size: int | None = None,
        run_id: str = "distwrap",
        initial_peers: Sequence[str] = (),
        compression: Literal["none", "fp16", "8bit"] = "none",
        average_state_every: int = 1,
        local_updates: bool = False,
        matchmaking_seconds: float = 3.0,
        averaging_seconds: float = 60.0,
        client_mode: bool = False,
        peer_seconds: float = 30.0,
        host: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.hivemind_options = HivemindOptions(
            target_batch_size=target_batch_size,
            batch_size=batch_size,
            run_id=run_id,
            initial_peers=initial_peers,  # type: ignore[arg-type]
            compression=compression,
            average_state_every=average_state_every,
            local_updates=local_updates,
            matchmaking_seconds=matchmaking_seconds,
            averaging_seconds=averaging_seconds,
            client_mode=client_mode,
            peer_seconds=peer_seconds,
            host=host,
            verbose=verbose,
        )

    def check(self, run: Options) -> None:
        require_package("hivemind", "strategy='hivemind'", "comm='local_sgd' or 'diloco', which need none")
        self.hivemind_options.require_batch_size()
        if run.comm is not None:
            raise OptionError("comm= does not go with strategy='hivemind', which exchanges by itself. Leave it out.")
        if isinstance(run.precision, str) and run.precision not in _PRECISIONS:
            raise OptionError(
                f"strategy='hivemind' has the precisions '32' and 'bf16', but not {run.precision!r}: peers "
                "average weights in float32, and each would scale its losses, and skip steps, on its own."
            )

    # Models and optimizers

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        for name in wrapping.options:
            raise OptionError(
                f"wrap_model({name}=…): this is an option of DDP, which strategy='hivemind' does not use. Leave it out."
            )
        if wrapping.comm is not None:
            raise OptionError("comm= does not go with strategy='hivemind', which exchanges by itself. Leave it out.")
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
        if world.placement.world_size > 1:
            require_group("wrap_model")
        world.part(Peers).start(self.hivemind_options)
        world.part(Collaborations)
        if world.placement.world_size > 1:
            take_rank_zero_weights(net)
        return LocalModel(LocalRouting(model, wrapping.in_precision, wrapping.forward_methods))

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        world = current_world()
        world.part(Peers).start(self.hivemind_options)
        world.part(Collaborations).add(optimizer, self.hivemind_options)
        return optimizer

    def step(self, optimizer: Optimizer) -> bool | None:
        """Step an optimizer, and return whether the weights changed, so that a scheduler counts global steps."""
        collaboration = current_world().part(Collaborations).of(optimizer)
        if collaboration is None:
            optimizer.step()
            return True
        before = collaboration.changes
        optimizer.step()
        return collaboration.changes > before

    def consolidate(self, model: nn.Module) -> None:
        """Give every rank the newest weights, when all ranks are here and due rounds are averaged."""
        current_world().part(Collaborations).consolidate(unwrap_model(model))

    def __repr__(self) -> str:
        given = [
            f"{each.name}={value!r}"
            for each in fields(HivemindOptions)
            if (value := getattr(self.hivemind_options, each.name)) != each.default
        ]
        return f"HivemindStrategy({', '.join(given)})"
