"""Algorithms of ``comm=``, by which ranks exchange gradients in few bytes, or weights now and then."""

from distwrap.comm.asynchronous import AsyncAveraging as AsyncAveraging
from distwrap.comm.base import (
    Algorithm as Algorithm,
    Averager as Averager,
    Bucket as Bucket,
    Link as Link,
    Traffic as Traffic,
)
from distwrap.comm.gradients import (
    BF16 as BF16,
    FP16 as FP16,
    AllReduce as AllReduce,
    ByteGrad as ByteGrad,
    GradientAlgorithm as GradientAlgorithm,
    PowerSGD as PowerSGD,
    TopK as TopK,
)
from distwrap.comm.qadam import QAdam as QAdam
from distwrap.comm.replicas import (
    Decentralized as Decentralized,
    DiLoCo as DiLoCo,
    LocalSGD as LocalSGD,
    LowPrecisionDecentralized as LowPrecisionDecentralized,
)
from distwrap.comm.weights import (
    Consolidated as Consolidated,
    WeightAlgorithm as WeightAlgorithm,
    WeightExchange as WeightExchange,
    consolidate as consolidate,
    pause as pause,
    traffic as traffic,
)
