"""The matrix of equality: each strategy against one process, by optimizer, by kind of step, and in each type.

A strategy is one row in `ROWS`. All combinations of a row run in one launch, three epochs each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap import FSDPStrategy, Strategy, scale_loss
from distwrap.strategies.pipeline import PipelineStrategy
from distwrap.testing.behaviours.base import Behaviour
from distwrap.testing.behaviours.gradients import SMALL_NORM, counted, windows
from distwrap.testing.behaviours.nets import small
from distwrap.testing.behaviours.precisions import BF16_TOLERANCE, FP16_TOLERANCE
from distwrap.testing.behaviours.sides import EXACT, ROUNDED, OneProcess, Trial, adamw, sgd
from tests.strategies.conformance import NodesOfOne, Pair

EPOCHS, BATCHES = 3, 4


def damped(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW for gradients in half precision: one near zero, whose sign is rounding, makes no whole step."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=0.01)


def lbfgs(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "lbfgs": lbfgs}
HALF = {"fp16 overflow": ("fp16", FP16_TOLERANCE), "bf16": ("bf16", BF16_TOLERANCE)}
EXACTLY = ("plain", "accumulate", "scale_loss", "clip")
# A closure has no scaled loss in torch, and LBFGS makes of a rounded or clipped gradient another direction altogether.
WAYS = {"sgd": (*EXACTLY, *HALF), "adamw": (*EXACTLY, *HALF), "lbfgs": EXACTLY[:3]}
WINDOWS = {"accumulate": 2, "scale_loss": 3}  # micro-batches a step


@dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        name: of the row, for the test.
        strategy: a name, or an object.
        nprocs: number of ranks.
        refuses: words of the combinations that it refuses by name, as ``"lbfgs"`` or ``"fp16 overflow"``.
        lacks: words of those that are not asked of it.
    """

    name: str
    strategy: str | Strategy
    nprocs: int = 2
    refuses: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


# What another row shows: rounding does not depend on how many ranks there are, nor the gradients on the optimizer, of
# which SGD is the one that sees their size.
AGAIN = (*(f"{way}, float32" for way in EXACTLY), *(f"adamw, {way}" for way in EXACTLY if way != "plain"))

ROWS = (
    Row("ddp", "ddp"),
    Row("ddp on three ranks", "ddp", 3, lacks=AGAIN),
    Row("ddp on four ranks", "ddp", 4, lacks=AGAIN),
    Row("ddp2", NodesOfOne(), lacks=AGAIN),
    Row("zero1", "zero1", refuses=("lbfgs",)),
    Row("zero1 on three ranks", "zero1", 3, refuses=("lbfgs",), lacks=AGAIN),
    Row("zero2", "zero2", refuses=("lbfgs",)),
    Row("fsdp", "fsdp", refuses=("lbfgs",)),
    Row("fsdp on three ranks", "fsdp", 3, refuses=("lbfgs",), lacks=AGAIN),
    Row("hsdp", FSDPStrategy(shard=2), 4, refuses=("lbfgs",), lacks=AGAIN),
    Row("tp", "tp", refuses=("lbfgs",)),
    Row("fsdp+tp", FSDPStrategy(tensor_parallel=2), 4, refuses=("lbfgs",), lacks=AGAIN),
    Row("pipeline", "pipeline", refuses=("lbfgs",)),
    Row("pipeline on three ranks", "pipeline", 3, refuses=("lbfgs",), lacks=AGAIN),
    Row("two pipelines", PipelineStrategy(stages=2), 4, refuses=("lbfgs",), lacks=AGAIN),
    Row("by hand", Pair(), refuses=("fp16 overflow",)),
    Row("by hand, two pairs", Pair(), 4, refuses=("fp16 overflow",), lacks=AGAIN),
)


def train(side: OneProcess, make: Callable[[Any], Optimizer], way: str, dtype: torch.dtype) -> Any:
    """Train three epochs, and return the weights and which steps were taken."""
    overflows = way == "fp16 overflow"
    model = side.wrap(small(dtype=dtype, scale=0.1 if overflows else 1.0))
    optimizer = side.prepare(make(model.parameters()))
    size, taken = WINDOWS.get(way, 1), []
    for epoch in range(EPOCHS):
        batches = [(x, y, *counted(side, index, x)) for index, (x, y) in enumerate(side.batches(BATCHES, dtype))]
        if overflows and side.rank == 0:
            batches[epoch][0][0] = 1e6  # a row of share 0 alone
        for first in range(0, BATCHES, size):
            gradients = partial(_gradients, side, model, optimizer, way, batches[first : first + size], size)
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(gradients)
            else:
                gradients()
                taken.append(bool(side.step(optimizer, SMALL_NORM if way == "clip" else None)))
    assert taken.count(False) == (EPOCHS if overflows else 0), f"the steps were taken so: {taken}"
    return side.weights(model), taken


def _gradients(side: OneProcess, model: Any, optimizer: Optimizer, way: str, window: list[Any], size: int) -> float:
    """Compute the gradients of a window anew, and return its mean loss."""
    optimizer.zero_grad()
    total = sum(count for *_, count in window)
    logged = 0.0
    for (x, y, keep, count), micro_batches, _ in windows(side, model, window, size):
        with side.autocast():
            if way != "scale_loss":
                loss = model.loss(x, y) / micro_batches
            elif isinstance(side, Trial):
                loss = scale_loss(model.loss_sum(x, y, keep), count)
            else:
                loss = model.loss_sum(x, y, keep) / total
        side.backward(loss)
        logged += loss.item()
    return side.mean(torch.tensor(logged)).item()


def _combinations() -> dict[str, Behaviour]:
    """Return each combination, by its words."""
    found = {}
    for name, ways in WAYS.items():
        for way in ways:
            for dtype in ("float32",) if way in HALF else ("float64", "float32"):
                make = damped if way in HALF and name == "adamw" else OPTIMIZERS[name]
                body = partial(_compared, make=make, way=way, dtype=getattr(torch, dtype))
                found[f"{name}, {way}, {dtype}"] = Behaviour(body)
    return found


def _compared(trial: Trial, *, make: Callable[[Any], Optimizer], way: str, dtype: torch.dtype) -> None:
    precision, tolerance = HALF.get(way, ("32", EXACT if dtype == torch.float64 else ROUNDED))
    trial.same(lambda side: train(side, make, way, dtype), precision=precision, tolerance=tolerance)


COMBINATIONS = _combinations()
