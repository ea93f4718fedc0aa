"""The mean of gradients by Horovod's all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from distwrap.checks import Check, is_number, one_of
from distwrap.comm import Averager, Bucket, GradientAlgorithm, Link
from distwrap.comm.base import option
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import current_world, say
from distwrap.strategies.horovod.group import HorovodGroup


@dataclass(frozen=True, kw_only=True)
class HorovodAllReduce(GradientAlgorithm):
    """The mean of gradients, or their Adasum, by Horovod; the options are those of `HorovodStrategy`."""

    compression: str = option("none", one_of("compression", ("none", "fp16")))
    adasum: bool = False
    predivide: float = option(1.0, Check("a positive number", lambda value: is_number(value) and value > 0, float))
    scale_lr: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adasum and (self.scale_lr or self.predivide != 1.0):
            raise OptionError(
                "HorovodStrategy(adasum=True): Adasum takes the learning rate of one rank, and has no predivide: leave "
                "scale_lr and predivide out."
            )

    def check(self, world_size: int) -> None:
        if self.adasum and world_size & (world_size - 1):
            raise OptionError(f"HorovodStrategy(adasum=True) is for 2, 4, 8, … ranks, and there are {world_size}.")

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _HorovodMean(self, link.size)

    def prepare_optimizer(self, optimizer: Optimizer, averager: Averager | None) -> Optimizer:
        if self.scale_lr and isinstance(averager, _HorovodMean):
            averager.scale_rates(optimizer)
        return optimizer


class _HorovodMean(Averager):
    def __init__(self, algorithm: HorovodAllReduce, size: int) -> None:
        import horovod.torch as hvd

        self._hvd, self._algorithm, self._size = hvd, algorithm, size
        self._group = current_world().part(HorovodGroup)
        self._number = current_world().count("horovod")  # of this model, the same on all ranks
        self._scaled: WeakSet[Optimizer] = WeakSet()

    def average(self, bucket: Bucket) -> None:
        hvd, algorithm = self._hvd, self._algorithm
        self._group.begin()
        if algorithm.scale_lr and not self._scaled:
            raise ModelError(
                "HorovodStrategy(scale_lr=True) multiplies the learning rates in wrap_optimizer(optimizer), which has "
                "not been called for an optimizer of this model."
            )
        kind = hvd.Compression.fp16 if algorithm.compression == "fp16" else hvd.Compression.none
        values, context = kind.compress(bucket.values)
        how: dict[str, Any] = {"op": hvd.Adasum if algorithm.adasum else hvd.Average}
        if algorithm.predivide != 1.0:
            factors = {"prescale_factor": 1 / algorithm.predivide, "postscale_factor": algorithm.predivide / self._size}
            how = {"op": hvd.Sum, **factors}
        # A name that is the same in each step lets Horovod skip asking all ranks whether they are ready.
        first = bucket.name_of.get(id(bucket.parameters[0]), "") if bucket.parameters else ""
        hvd.allreduce_(values, name=f"distwrap.{self._number}.{first}.{values.numel()}", **how)
        bucket.values.copy_(kind.decompress(values, context))

    def scale_rates(self, optimizer: Optimizer) -> None:
        """Multiply the learning rates by the number of ranks, once, and say so."""
        if optimizer in self._scaled:
            return
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise ModelError(
                "HorovodStrategy(scale_lr=True): a scheduler holds the learning rates already. Call "
                "wrap_optimizer(optimizer) before the scheduler is made."
            )
        before = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self._size
        self._scaled.add(optimizer)
        after = [group["lr"] for group in optimizer.param_groups]
        say(f"scale_lr=True: the learning rates of {type(optimizer).__name__}, {before}, are now {after}")
