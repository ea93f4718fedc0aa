"""DDP on torch_xla's devices, which are no accelerator for torch: TPUs, or the CPU for tests.

Each optimizer step ends with ``torch_xla.sync()``, which runs the recorded operations.

Source: https://docs.pytorch.org/xla/master/learn/pytorch-on-xla-devices.html
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distwrap.environments import Placement
from distwrap.errors import LaunchError, OptionError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.setup import join
from distwrap.group.world import World
from distwrap.options import Options
from distwrap.strategies.ddp import DDPStrategy


class XLAStrategy(DDPStrategy):
    """DDP on torch_xla's devices; ``strategy="xla"``, which needs ``launcher="xla"``."""

    is_simulated = False

    def check(self, run: Options) -> None:
        super().check(run)
        if run.launcher != "xla":
            raise OptionError(
                f"strategy='xla' runs on ranks that torch_xla starts: write launcher='xla', not {run.launcher!r}."
            )

    def join(self, placement: Placement, options: Options, secret: bytes) -> World:
        import torch_xla

        world = join(placement, options, device=torch_xla.device(), inherited=secret)
        world.part(OptimizerSteps).listen(Phase.FINISH, lambda *_: torch_xla.sync())
        return world

    def init_process_group(self, backend: str, **arguments: Any) -> None:
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend

        dist.init_process_group("xla", init_method="xla://", timeout=arguments["timeout"])
        asked, found = arguments["world_size"], dist.get_world_size()
        if found != asked:
            raise LaunchError(f"torch_xla reports {found} rank(s), but {asked} were started.")
