"""Algorithms of ``comm=``, by which ranks exchange gradients in few bytes, or weights now and then.

Each module is imported when one of its names is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distwrap.comm.allreduce import BF16 as BF16, FP16 as FP16, AllReduce as AllReduce, ByteGrad as ByteGrad
    from distwrap.comm.asynchronous import AsyncAveraging as AsyncAveraging
    from distwrap.comm.base import Algorithm as Algorithm, Averager as Averager, Bucket as Bucket
    from distwrap.comm.consolidation import (
        Consolidated as Consolidated,
        consolidate as consolidate,
        pause as pause,
        traffic as traffic,
    )
    from distwrap.comm.decentralized import Decentralized as Decentralized
    from distwrap.comm.diloco import DiLoCo as DiLoCo
    from distwrap.comm.gradients import GradientAlgorithm as GradientAlgorithm
    from distwrap.comm.link import Link as Link, Traffic as Traffic
    from distwrap.comm.local_sgd import LocalSGD as LocalSGD
    from distwrap.comm.low_precision import LowPrecisionDecentralized as LowPrecisionDecentralized
    from distwrap.comm.powersgd import PowerSGD as PowerSGD
    from distwrap.comm.qadam import QAdam as QAdam
    from distwrap.comm.topk import TopK as TopK
    from distwrap.comm.weights import WeightAlgorithm as WeightAlgorithm, WeightExchange as WeightExchange

# The same names for the interpreter, which imports a module when one of its names is first used.
_NAMES = {
    "allreduce": "AllReduce BF16 ByteGrad FP16",
    "asynchronous": "AsyncAveraging",
    "base": "Algorithm Averager Bucket",
    "consolidation": "Consolidated consolidate pause traffic",
    "decentralized": "Decentralized",
    "diloco": "DiLoCo",
    "gradients": "GradientAlgorithm",
    "link": "Link Traffic",
    "local_sgd": "LocalSGD",
    "low_precision": "LowPrecisionDecentralized",
    "powersgd": "PowerSGD",
    "qadam": "QAdam",
    "topk": "TopK",
    "weights": "WeightAlgorithm WeightExchange",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value
