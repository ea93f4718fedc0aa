"""``strategy="horovod"``: replicas whose gradients Horovod averages; extra ``horovod``.

DDP collects gradients and decides when they are sent, as for every algorithm in `distwrap.comm`, and Horovod sends
them. So accumulation, clipping, unused parameters and the comparison of ranks work as under DDP.
Source: https://horovod.readthedocs.io/en/stable/pytorch.html.
"""

from __future__ import annotations

from typing import Any, Literal

from distwrap.checks import refuses_removed
from distwrap.errors import OptionError
from distwrap.group.world import Layout, World
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.horovod.allreduce import HorovodAllReduce
from distwrap.strategies.horovod.group import HorovodGroup


class HorovodStrategy(DDPStrategy):
    """Strategy of replicas that average their gradients with Horovod.

    Args:
        compression: ``"fp16"`` rounds sent gradients to float16.
        adasum: whether to add gradients by Adasum, which needs Horovod built with MPI or NCCL, and a power of two
            ranks.
        predivide: Horovod's ``gradient_predivide_factor``: gradients are divided by it before the sum, and multiplied
            by it after the sum.
        backend: the backend of torch's process group, which carries everything except gradients.
        **ddp_options: the options of `DDPStrategy`.

    Raises:
        OptionError: an argument has a wrong value, or two contradict each other.

    Example:
        >>> HorovodStrategy(compression="fp16").algorithm.compression
        'fp16'
    """

    is_simulated = False

    @refuses_removed
    def __init__(
        self,
        *,
        compression: Literal["none", "fp16"] = "none",
        adasum: bool = False,
        predivide: float = 1.0,
        backend: str | None = None,
        **ddp_options: Any,
    ) -> None:
        if "comm" in ddp_options:
            raise OptionError("HorovodStrategy: Horovod exchanges the gradients: leave comm= out.")
        self.algorithm = HorovodAllReduce(compression=compression, adasum=adasum, predivide=predivide)
        # Horovod's own script has no buckets in addition to the gradients.
        super().__init__(backend=backend, comm=self.algorithm, **{"gradient_as_bucket_view": True, **ddp_options})

    def check(self, run: Options) -> None:
        require_package("horovod", "strategy='horovod'", "strategy='ddp'")
        if run.comm is not None:
            raise OptionError(
                f"comm={run.comm!r}, but Horovod exchanges the gradients: leave comm out, or choose strategy='ddp'."
            )
        super().check(run)

    def setup(self, world: World) -> Layout | None:
        group = world.part(HorovodGroup)
        if self.algorithm.adasum:
            group.require_adasum()
        return super().setup(world)
