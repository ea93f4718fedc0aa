"""Recommend an exchange algorithm, from its measured time on the real ranks and a model's size.

An exchange of n weights, with codec and link, takes about a + b·n seconds. Two measured sizes give a and b.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distwrap.comm.base import Averager, Bucket, Link, Traffic
from distwrap.comm.compressed import CompressedMean
from distwrap.comm.qadam import QAdam
from distwrap.devices.kinds import kind_of
from distwrap.group.collectives import gather_object
from distwrap.group.world import current_world
from distwrap.registry import algorithms

_SMALL, _LARGE = 1 << 14, 1 << 21  # weights; the larger size shrinks until it takes at most _SECONDS
_SECONDS = 1.0
_OVERLAP = 0.5  # part of the compute during which DDP exchanges, in the backward
_WORTH = 1.15  # an algorithm that changes training more must be so many times faster
_EVERY = 32  # steps between two exchanges of weights

# In the order of how much they change training.
_MEASURED = (
    *("allreduce", "bf16", "fp16", "bytegrad", "bytegrad(error_feedback=True)", "powersgd"),
    *("qadam", "qadam(bits=1)", "topk"),
)


@dataclass(frozen=True)
class Cost:
    """Time of an exchange as a function of the number of weights.

    Attributes:
        seconds: seconds of an empty exchange.
        seconds_a_weight: further seconds for each weight.
    """

    seconds: float
    seconds_a_weight: float

    def of(self, weights: float) -> float:
        """Return the seconds of an exchange of so many weights."""
        return self.seconds + self.seconds_a_weight * weights


@dataclass(frozen=True)
class Prediction:
    """Predicted times with one algorithm.

    Attributes:
        comm: the algorithm, as `wrap_model` takes it.
        exchange: mean seconds of the exchange in a step.
        step: seconds of a step with the exchange, a part of which overlaps with the compute.
    """

    comm: str
    exchange: float
    step: float


@dataclass(frozen=True)
class Advice:
    """Measurements, and the algorithm that they recommend.

    Attributes:
        ranks: the number of ranks.
        weights: the number of weights of the model.
        compute: seconds of one step without an exchange.
        bandwidth: bytes a second that each rank sends in an all-reduce.
        predictions: one for each algorithm, in the order of how much they change training.
        choice: the first algorithm that no later one beats by much.
        reason: the reason for the choice.
    """

    ranks: int
    weights: int
    compute: float
    bandwidth: float
    predictions: list[Prediction]
    choice: str
    reason: str


def advise(weights: int, compute: float | None = None) -> Advice:
    """Measure the exchange of each algorithm between the ranks of this world, and recommend one; a collective.

    Args:
        weights: the number of weights of the model.
        compute: seconds of one of its steps on one rank; ``None`` to measure a stack of linear layers.
    """
    world = current_world()
    ranks = world.placement.world_size
    compute = _slowest(_compute(weights, world.device) if compute is None else compute)
    link = Link(dist.group.WORLD, list(range(ranks)), world.placement.rank, Traffic())
    costs = {name: _cost(partial(_averager, name, link, world.device), world.device) for name in _MEASURED}
    full = costs["allreduce"]
    bandwidth = 8 * (ranks - 1) / ranks / max(full.seconds_a_weight, 1e-12)
    predictions = predict(costs, weights, compute)
    choice, reason = choose(predictions, compute)
    return Advice(ranks, weights, compute, bandwidth, predictions, choice, reason)


def predict(costs: dict[str, Cost], weights: float, compute: float) -> list[Prediction]:
    """Predict a step under each algorithm. Algorithms of weights use the costs of `allreduce` and `bytegrad`.

    Example:
        >>> slow = predict({"allreduce": Cost(0.0, 1e-7), "bytegrad": Cost(0.0, 0.25e-7)}, 10_000_000, 0.1)
        >>> [(row.comm, round(row.step, 2)) for row in slow if "sgd" in row.comm or row.comm in ("allreduce", "async")]
        [('allreduce', 1.05), ('local_sgd(sync_every=32)', 0.13), ('async', 0.1)]
    """
    rows = []
    for name, cost in costs.items():
        exchange = cost.of(weights)
        rows.append(Prediction(name, exchange, compute + max(0.0, exchange - _OVERLAP * compute)))
    full, byte = costs["allreduce"].of(weights), costs["bytegrad"].of(weights)
    rows += [
        Prediction("decentralized", full, max(compute, full)),  # overlaps with the whole step
        Prediction("low_precision_decentralized", byte, compute + byte),  # overlaps with nothing
        Prediction(f"local_sgd(sync_every={_EVERY})", full / _EVERY, compute + full / _EVERY),
        Prediction(f"diloco(sync_every={_EVERY})", full / _EVERY, compute + full / _EVERY),
        Prediction("async", full, compute),
    ]
    return rows


def choose(predictions: Sequence[Prediction], compute: float) -> tuple[str, str]:
    """Return the first algorithm that no later one beats by 15 %, and the reason.

    Example:
        >>> rows = predict({"allreduce": Cost(0.0, 1e-9), "bytegrad": Cost(0.0, 0.3e-9)}, 10_000_000, 0.1)
        >>> choose(rows, 0.1)
        ('allreduce', 'the exchange hides behind the compute: leave comm= out')
    """
    best = min(row.step for row in predictions)
    chosen = next(row for row in predictions if row.step <= _WORTH * best)
    first = predictions[0]
    if chosen is first and first.exchange <= _OVERLAP * compute:
        return chosen.comm, "the exchange hides behind the compute: leave comm= out"
    if chosen is first:
        return chosen.comm, "no other is faster by much: leave comm= out"
    saved = first.step / chosen.step
    return chosen.comm, f"{saved:.1f} times the steps of plain DDP, and no other is faster by much"


def _averager(name: str, link: Link, device: torch.device) -> Averager:
    algorithm: Any = algorithms.make(name)
    if isinstance(algorithm, QAdam):  # which wants an optimizer
        return CompressedMean(link, algorithm.codec(), feedback=True)
    return algorithm.averager(link, device)  # type: ignore[no-any-return]


def _cost(make: Callable[[], Averager], device: torch.device) -> Cost:
    few = _exchange_seconds(make(), _SMALL, device)
    large = _LARGE
    while large > 2 * _SMALL and few * large / _SMALL > _SECONDS:
        large //= 2
    many = _exchange_seconds(make(), large, device)
    slope = max(0.0, many - few) / (large - _SMALL)
    return Cost(max(0.0, few - slope * _SMALL), slope)


def _exchange_seconds(averager: Averager, weights: int, device: torch.device) -> float:
    """Return the seconds of an exchange of a square matrix's gradients on the slowest rank."""
    parameter = nn.Parameter(torch.empty(int(weights**0.5), int(weights**0.5), device=device))
    values = torch.randn(parameter.numel(), device=device)
    return _slowest(_best(lambda: averager.average(Bucket(values.clone(), [parameter])), device, dist.barrier))


def _compute(weights: int, device: torch.device) -> float:
    """Return the seconds of a step of linear layers with about so many weights, on 32 samples."""
    width = 512
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, weights // width**2)))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _best(step, device)


def _best(work: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """Return the best of three times in seconds, after a first run that makes buffers and connections."""
    taken = []
    for _ in range(4):
        before()
        start = time.perf_counter()
        work()
        kind_of(device).finish(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _slowest(seconds: float) -> float:
    return max(gather_object(seconds))
