"""Mean of gradients by Horovod's all-reduce."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from distwrap.checks import Check, is_number, one_of
from distwrap.comm import Averager, Bucket, GradientAlgorithm, Link
from distwrap.comm.base import option
from distwrap.errors import OptionError
from distwrap.group.world import current_world
from distwrap.strategies.horovod.group import HorovodGroup
from distwrap.supervision.activity import Activity

_LOOK_SECONDS = 0.0002  # between two checks of an exchange
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, kw_only=True)
class HorovodAllReduce(GradientAlgorithm):
    """Mean or Adasum of gradients by Horovod, with the options of `HorovodStrategy`."""

    compression: str = option("none", one_of("compression", ("none", "fp16")))
    adasum: bool = False
    predivide: float = option(1.0, Check("a positive number", lambda value: is_number(value) and value > 0, float))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adasum and self.predivide != 1.0:
            raise OptionError("HorovodStrategy(adasum=True): Adasum has no predivide: leave predivide out.")

    def check(self, world_size: int) -> None:
        if self.adasum and world_size & (world_size - 1):
            raise OptionError(f"HorovodStrategy(adasum=True) is for 2, 4, 8, … ranks, and there are {world_size}.")

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _HorovodMean(self, link.size)


class _HorovodMean(Averager):
    def __init__(self, algorithm: HorovodAllReduce, size: int) -> None:
        import horovod.torch as hvd

        self._hvd, self._algorithm, self._size = hvd, algorithm, size
        self._group = current_world().part(HorovodGroup)
        self._number = current_world().count("horovod")  # of this model, the same on all ranks

    def average(self, bucket: Bucket) -> None:
        hvd, algorithm = self._hvd, self._algorithm
        self._group.begin()
        values = bucket.values.float() if bucket.values.dtype == torch.bfloat16 else bucket.values  # it lacks bfloat16
        # Horovod's own mean divides after the sum, which may overflow.
        before, after, kind = 1 / algorithm.predivide, algorithm.predivide / self._size, hvd.Compression.none
        if algorithm.compression == "fp16":
            before, after, kind = 1 / self._size, 1.0, hvd.Compression.fp16
            if not (values.abs() <= _LARGEST).all():
                bucket.complain()
        how: dict[str, Any] = {"op": hvd.Sum, "prescale_factor": before, "postscale_factor": after}
        if algorithm.adasum:
            how = {"op": hvd.Adasum}
        values, context = kind.compress(values)
        # With the same name in each step, Horovod need not ask all ranks whether they are ready.
        first = bucket.name_of.get(id(bucket.parameters[0]), "") if bucket.parameters else ""
        name = f"distwrap.{self._number}.{first}.{values.numel()}"
        self._wait_for(hvd.allreduce_async_(values, name=name, **how))
        bucket.values.copy_(kind.decompress(values, context))

    def _wait_for(self, handle: int) -> None:
        """Wait for an exchange with the time limit of collectives; Horovod itself has none."""
        from horovod.common.exceptions import HorovodInternalError

        timeout, began = current_world().options.timeout, time.monotonic()
        while not self._hvd.poll(handle):
            if time.monotonic() > began + timeout:
                raise HorovodInternalError(f"Timed out waiting {timeout:g} s for a gradient that not all ranks sent")
            time.sleep(_LOOK_SECONDS)
        with current_world().part(Activity).waiting(timed=False):
            self._hvd.synchronize(handle)
