"""The two sides of a comparison: one loop runs through the helpers under a strategy, and in plain torch.

A loop takes a side, and does with it what a hand-written loop does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap.group.collectives import mean
from distwrap.group.world import World
from distwrap.model.wrapped_models import bound_strategy, parameters_of
from distwrap.strategies import wrap_model, wrap_optimizer
from distwrap.strategies.steps import Step, backward, optimizer_step
from distwrap.testing import nets
from distwrap.testing.nets import ROWS, SmallNet, examples, small

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OneProcess:
    """One process in plain torch, which takes whole batches.

    Args:
        shares: how many shares a whole batch is made of.
        precision: in which the loop computes.

    Attributes:
        rank: of the share that this side takes.
        size: the number of shares that this side's ranks take.
    """

    def __init__(self, shares: int, precision: str = "32") -> None:
        self.shares, self.precision = shares, precision
        self.rank, self.size = 0, 1
        self.scaler = torch.amp.GradScaler("cpu") if precision == "fp16" else None

    @property
    def alone(self) -> OneProcess:
        """The side of one process, in this side's precision."""
        return OneProcess(self.shares, self.precision)

    def wrap(self, net: nn.Module, **options: Any) -> Any:
        """Return the model that the loop trains."""
        return net

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that the loop steps."""
        return wrap_optimizer(optimizer, apart=True)  # the same, whose tensors nobody compares with other ranks'

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this side's rows of a whole batch."""
        return whole[self.rank :: self.size]

    def batches(self, count: int = 2, dtype: torch.dtype | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield this side's share of each batch of an epoch."""
        for whole in zip(*(rows.chunk(count) for rows in examples(count * ROWS * self.shares, dtype)), strict=True):
            yield tuple(map(self.share, whole))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward computes in this side's precision."""
        half = HALVES.get(self.precision)
        return nullcontext() if half is None else torch.autocast("cpu", half)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> Step:
        """Clip and step; return whether the step was taken, and the norm before the clip."""
        self.prepare(optimizer)
        scale = None if self.scaler is None else self.scaler.get_scale()
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm = None if max_norm is None else self.clip(optimizer, max_norm)
        if self.scaler is None:
            optimizer.step()
            return Step(True, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        return Step(self.scaler.get_scale() == scale, norm)

    def clip(self, optimizer: Optimizer, max_norm: float) -> Any:
        """Clip an optimizer's gradients; return the norm before."""
        return nn.utils.clip_grad_norm_(parameters_of(optimizer).values(), max_norm)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Average a value of this side's share over all shares."""
        return value

    def weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state of a model, and of an optimizer as well."""
        return {name: value.clone() for name, value in model.state_dict().items()}


class Trial(OneProcess):
    """Tools of a behaviour on one rank: the loop's side under the strategy, and what compares it with one process.

    Args:
        world: of the run.
        folder: of this behaviour's files, the same on all ranks.
        precision: in which the loop computes.

    Attributes:
        strategy: that is tried.
    """

    def __init__(self, world: World, folder: Path, precision: str = "32") -> None:
        super().__init__(world.layout.size, precision)
        self.world, self.folder = world, folder
        self.strategy = world.strategy
        self.rank, self.size = world.layout.rank, world.layout.size

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        return super().share(whole).to(self.world.device)

    def wrap(self, net: nn.Module, **options: Any) -> Any:
        if self.precision != "32":  # with the strategy named, it is asked whether it has the precision
            options = {"precision": self.precision, "strategy": self.strategy, **options}
        return wrap_model(net, **options)

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        return wrap_optimizer(optimizer)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # the wrapped model sees to it

    def backward(self, loss: torch.Tensor) -> None:
        backward(loss)

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> Step:
        return optimizer_step(optimizer, max_norm=max_norm)

    def clip(self, optimizer: Optimizer, max_norm: float) -> Any:
        return self.strategy.clip(optimizer, parameters_of(optimizer).values(), max_norm)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = mean(value)
        return found

    def weights(self, model: nn.Module) -> dict[str, Any]:
        strategy = bound_strategy(model) or self.strategy
        state = strategy.state(model, everywhere=True)
        return {name: value.clone() for name, value in state.items()}

    def same(self, loop: Callable[[Any], Any], *, precision: str = "32", tolerance: float | None = None) -> None:
        """Run a loop on both sides, and compare what they return."""
        expected = loop(OneProcess(self.shares, precision))  # first: nobody watches optimizers yet
        compare(loop(Trial(self.world, self.folder, precision)), expected, tolerance=tolerance)


def compare(found: Any, expected: Any, *, tolerance: float | None = None) -> None:
    """Raise where two nestings of tensors and numbers, on whatever devices, differ in structure, shape, or a number."""
    atol = nets.tolerance() if tolerance is None else tolerance
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, check_device=False)


def fit(
    side: OneProcess,
    make: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    *,
    model: Any = None,
    epochs: int = 3,
    dtype: torch.dtype | None = None,
) -> Any:
    """Train as a hand-written loop does, and return the weights.

    Args:
        side: of the comparison.
        make: the optimizer; by default SGD with momentum.
        model: wrapped already; by default a new one.
        epochs: over all batches.
        dtype: of the new model, and of the data.
    """
    model = side.wrap(small(dtype=dtype)) if model is None else model
    optimizer = side.prepare((make or sgd)(model.parameters()))
    for _ in range(epochs):
        epoch(side, model, optimizer, dtype)
    return side.weights(model)


def epoch(side: OneProcess, model: SmallNet, optimizer: Optimizer, dtype: torch.dtype | None = None) -> None:
    """Train over all batches once."""
    for x, y in side.batches(dtype=dtype):
        with side.autocast():
            loss = model.loss(x, y)
        side.backward(loss)
        side.step(optimizer)
        optimizer.zero_grad()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=0.01)
