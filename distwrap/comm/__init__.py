"""How ranks exchange what they have learnt: gradients in few bytes, or weights now and then.

An algorithm is imported when it is chosen.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distwrap.comm.base import Algorithm, Averager, Bucket
from distwrap.comm.consolidate import Consolidated, consolidate, pause, traffic

if TYPE_CHECKING:
    from distwrap.comm.allreduce import BF16, FP16, AllReduce
    from distwrap.comm.asynchronous import AsyncAveraging
    from distwrap.comm.bytegrad import ByteGrad
    from distwrap.comm.decentralized import Decentralized
    from distwrap.comm.diloco import DiLoCo
    from distwrap.comm.gradients import GradientAlgorithm
    from distwrap.comm.link import Link, Traffic
    from distwrap.comm.local_sgd import LocalSGD
    from distwrap.comm.low_precision import LowPrecisionDecentralized
    from distwrap.comm.powersgd import PowerSGD
    from distwrap.comm.qadam import QAdam
    from distwrap.comm.topk import TopK
    from distwrap.comm.weights import WeightAlgorithm, WeightExchange

__all__ = [
    "BF16",
    "FP16",
    "Algorithm",
    "AllReduce",
    "AsyncAveraging",
    "Averager",
    "Bucket",
    "ByteGrad",
    "Consolidated",
    "Decentralized",
    "DiLoCo",
    "GradientAlgorithm",
    "Link",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "PowerSGD",
    "QAdam",
    "TopK",
    "Traffic",
    "WeightAlgorithm",
    "WeightExchange",
    "consolidate",
    "pause",
    "traffic",
]

_PLACES = {
    "AllReduce": "allreduce",
    "AsyncAveraging": "asynchronous",
    "BF16": "allreduce",
    "ByteGrad": "bytegrad",
    "Decentralized": "decentralized",
    "DiLoCo": "diloco",
    "FP16": "allreduce",
    "Link": "link",
    "GradientAlgorithm": "gradients",
    "LocalSGD": "local_sgd",
    "LowPrecisionDecentralized": "low_precision",
    "PowerSGD": "powersgd",
    "QAdam": "qadam",
    "TopK": "topk",
    "Traffic": "link",
    "WeightAlgorithm": "weights",
    "WeightExchange": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
