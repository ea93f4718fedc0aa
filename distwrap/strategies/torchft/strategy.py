"""``strategy="torchft"``, chosen by ``max_lost=``: replicas of which some may be lost while the others go on.

torchft's lighthouse and managers know the present ranks, and let all or none of them take a step. The launcher starts a
lost rank again, which takes over the state of the others.
Source: https://docs.pytorch.org/torchft/
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from torch import nn

from distwrap.checks import AT_LEAST_ONE, SECONDS
from distwrap.devices import selection
from distwrap.devices.kinds import kind_of
from distwrap.environments import Placement, distwrap_environment
from distwrap.errors import LaunchError, ModelError, OptionError
from distwrap.group.setup import import_before_group
from distwrap.group.world import World, activate, current_world
from distwrap.model.distributed import LocalModel
from distwrap.model.transparent import unwrap_model
from distwrap.network import interfaces, stores
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.rank_zero_weights import take_rank_zero_weights
from distwrap.strategies.single import local

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


class TorchFTStrategy(Strategy):
    """Strategy with the same model in each process, of which some may be lost for a while.

    Args:
        max_lost: how many ranks may be missing while the others take steps; with more, they wait for one to come back.
        heartbeat_seconds: seconds without a heartbeat after which a rank counts as lost.
        come_back: whether lost ranks are started again, which needs a loop over `resumable`; otherwise the others go on
            without them, in any loop.
        verbose: whether torchft may print messages.

    Raises:
        OptionError: an argument has a wrong value.

    Example:
        >>> TorchFTStrategy(max_lost=2).max_lost
        2
    """

    backend = "gloo"

    def __init__(
        self, *, max_lost: int = 1, heartbeat_seconds: float = 2.0, come_back: bool = True, verbose: bool = False
    ) -> None:
        AT_LEAST_ONE("TorchFTStrategy: max_lost", max_lost)
        SECONDS("TorchFTStrategy: heartbeat_seconds", heartbeat_seconds)
        self.max_lost, self.heartbeat_seconds = max_lost, heartbeat_seconds
        self.come_back, self.verbose = come_back, verbose

    def check(self, run: Options) -> None:
        require_package("torchft", "max_lost=")
        if run.comm is not None:
            from distwrap.strategies.torchft.rounds import refuse_unlike

            refuse_unlike(run.comm)
        if str(run.precision) == "fp16":
            raise OptionError(
                "precision='fp16' does not go with max_lost=, because its scaler cannot follow lost steps. Use 'bf16'."
            )
        if run.retrofit and self.come_back:
            raise OptionError(
                "retrofit=True does not go with ranks that come back, whose loop is over distwrap.resumable: wrap the "
                "objects in the function, or say strategy=TorchFTStrategy(come_back=False)."
            )
        if run.max_restarts:
            raise OptionError(
                "max_restarts= starts all ranks again, and max_lost= only the lost ones: give one of the two."
            )

    def join(self, placement: Placement, options: Options, secret: bytes) -> World | None:
        if placement.world_size == 1:
            return None
        address, place = os.environ.get(LIGHTHOUSE), os.environ.get(distwrap_environment.STORE, "")
        if not address or not place:
            raise LaunchError(
                f"rank {placement.rank}: max_lost= needs ranks that distwrap itself has started, so that it can start "
                f"a lost one again. Start the script by `python`, with nprocs=, and not under {placement.source}."
            )
        from distwrap.strategies.torchft.quiet import leave_out_torchft

        if not self.verbose:
            leave_out_torchft()  # before torchft is imported
        from distwrap.strategies.torchft.members import TorchFTMembers

        import_before_group()
        device = selection.choose_device(placement, selection.visible_devices())
        kind_of(device).use(device)
        world = World(placement, device, backend="gloo", options=options, secret=secret)
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            world.cleanup.enter_context(interfaces.through(interfaces.LOOPBACK, "GLOO_SOCKET_IFNAME"))
        world.members = members = TorchFTMembers(
            world,
            address,
            stores.from_outside(place),
            fewest=placement.world_size - self.max_lost,
            come_back=self.come_back,
        )
        world.cleanup.callback(members.close)
        activate(world)
        members.arrive()
        return world

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        members: Any = world.members
        if members is None and world.placement.world_size > 1:
            raise ModelError("strategy='torchft' must be chosen for the whole run: say @distributed(max_lost=1).")
        if members is None:
            return local(model, wrapping)
        from distwrap.strategies.torchft.averaging import Averaging, Averagings
        from distwrap.strategies.torchft.meetings import WRAPPING
        from distwrap.strategies.torchft.rounds import WeightRounds, refuse_unlike
        from distwrap.strategies.torchft.state import running_statistics

        if wrapping.options:
            raise OptionError(f"max_lost= takes none of DDP's options, but got {', '.join(wrapping.options)}.")
        if not members.is_away:
            members.collective(WRAPPING, lambda: take_rank_zero_weights(model))
        plain = unwrap_model(model)
        algorithm: Any = wrapping.comm
        if algorithm is not None:
            refuse_unlike(algorithm)
            members.add_model(
                plain, WeightRounds(plain, members.end_round, algorithm, partial(running_statistics, plain))
            )
        else:
            members.add_model(plain)
            world.part(Averagings).of[plain] = Averaging(plain, members)
        return LocalModel(model, wrapping.in_precision, wrapping.forward_methods)

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        from distwrap.strategies.torchft.averaging import Averagings

        averaging = current_world().part(Averagings).of.get(unwrap_model(model))
        if averaging is not None:
            averaging.is_on = on
