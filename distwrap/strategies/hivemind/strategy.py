"""``strategy="hivemind"``: peers that train one model together, and may come and go; the extra ``hivemind``.

Each rank is a peer. Its gradients are summed on it until the samples of all peers are `target_batch_size`; then the
peers that are there look for each other, average the gradients, and each steps its own optimizer. That is an epoch in
hivemind's words, and a global step in ours.
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
from distwrap.model.distributed import LocalModel
from distwrap.model.transparent import unwrap_model
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.hivemind.optimizer import Collaborations
from distwrap.strategies.hivemind.options import HivemindOptions
from distwrap.strategies.hivemind.peers import Peers
from distwrap.strategies.optimizer_share import refuse_sparse
from distwrap.strategies.rank_zero_weights import take_rank_zero_weights

_PRECISIONS = ("32", "bf16")


class HivemindStrategy(Strategy):
    """Peers that average gradients and weights by hivemind.

    Args:
        target_batch_size: samples, over all peers, after which the weights change; by default those of one step of each
            rank of this run. All that train together give the same.
        batch_size: samples of one step of one rank, by which it is counted and weighted: those of a whole window where
            the loop accumulates.
        run_id: by which peers know each other; another run trains with this one if it has the same, and reaches it.
        initial_peers: addresses of peers of another run, which prints them; this run joins it.
        compression: of gradients on the way: ``"none"``, ``"fp16"`` or ``"8bit"``. Weights travel in full.
        average_state_every: global steps after which weights are averaged too, which brings peers together again that
            have missed a round.
        local_updates: each step of a rank changes its weights by its own gradients, and a global step averages weights
            alone.
        matchmaking_seconds: for which a peer looks for others before each round.
        averaging_seconds: limit of a round; then a peer goes on with its own gradients.
        client_mode: take no connections, as behind a firewall.
        peer_seconds: in which each rank must see the others.
        host: where peers are reached: ``"loopback"``, an address of this node, or ``"0.0.0.0"`` for all of them; by
            default loopback where the run has one node and no initial peers.
        verbose: print hivemind's own log.

    Raises:
        OptionError: they contradict each other, or are of no such kind.

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
        return LocalModel(model, wrapping.in_precision, wrapping.forward_methods)

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        world = current_world()
        world.part(Peers).start(self.hivemind_options)
        world.part(Collaborations).add(optimizer, self.hivemind_options)
        return optimizer

    def step(self, optimizer: Optimizer) -> bool | None:
        """Step an optimizer; whether that changed the weights, so that a scheduler given along counts global steps."""
        collaboration = current_world().part(Collaborations).of(optimizer)
        if collaboration is None:
            optimizer.step()
            return True
        before = collaboration.changes
        optimizer.step()
        return collaboration.changes > before

    def consolidate(self, model: nn.Module) -> None:
        """Give every rank the newest weights, once all ranks are here and what is due is averaged."""
        current_world().part(Collaborations).consolidate(unwrap_model(model))

    def __repr__(self) -> str:
        given = [
            f"{each.name}={value!r}"
            for each in fields(HivemindOptions)
            if (value := getattr(self.hivemind_options, each.name)) != each.default
        ]
        return f"HivemindStrategy({', '.join(given)})"
