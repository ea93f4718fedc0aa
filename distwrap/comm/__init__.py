"""How ranks exchange what they have learnt: gradients in few bytes, or weights now and then."""

from __future__ import annotations

from distwrap.comm.allreduce import BF16, FP16, AllReduce
from distwrap.comm.asynchronous import AsyncAveraging
from distwrap.comm.base import Algorithm, Averager, Bucket, GradientAlgorithm
from distwrap.comm.bytegrad import ByteGrad
from distwrap.comm.consolidate import Consolidated, consolidate, pause, traffic
from distwrap.comm.decentralized import Decentralized
from distwrap.comm.diloco import DiLoCo
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
