"""``strategy="horovod"``: replicas whose gradients Horovod averages; the extra ``horovod``.

DDP collects gradients and decides when they travel, as for every algorithm in `distwrap.comm`; Horovod carries them. So
accumulation, clipping, unused parameters and the proof that ranks are in sync hold as under DDP.
Source: https://horovod.readthedocs.io/en/stable/pytorch.html.
"""

from __future__ import annotations

from typing import Any, Literal

from distwrap.errors import OptionError
from distwrap.group.world import Layout, World
from distwrap.options import Options
from distwrap.packages import require_package
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.horovod.allreduce import HorovodAllReduce
from distwrap.strategies.horovod.group import HorovodGroup


class HorovodStrategy(DDPStrategy):
    """Replicas that average their gradients by Horovod.

    Args:
        compression: ``"fp16"`` rounds gradients to float16 on the way.
        adasum: add gradients by Adasum, where Horovod was built with MPI or NCCL; the ranks are a power of two then.
        predivide: the factor by whose inverse gradients are multiplied before the sum, and by itself after it:
            Horovod's ``gradient_predivide_factor``.
        scale_lr: multiply the learning rates by the number of ranks in `wrap_optimizer`, and say so. It is never done
            by itself: with a batch that is divided over the ranks, there is nothing to scale.
        backend: of torch's process group, which everything but gradients goes through.
        **ddp_options: as for `DDPStrategy`.

    Raises:
        OptionError: they contradict each other, or are of no such kind.

    Example:
        >>> HorovodStrategy(compression="fp16").algorithm.compression
        'fp16'
    """

    def __init__(
        self,
        *,
        compression: Literal["none", "fp16"] = "none",
        adasum: bool = False,
        predivide: float = 1.0,
        scale_lr: bool = False,
        backend: str | None = None,
        **ddp_options: Any,
    ) -> None:
        if "comm" in ddp_options:
            raise OptionError("HorovodStrategy: Horovod exchanges the gradients: leave comm= out.")
        self.algorithm = HorovodAllReduce(
            compression=compression, adasum=adasum, predivide=predivide, scale_lr=scale_lr
        )
        # Horovod's own script has no buckets beside the gradients.
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
