"""The loops of the matrix, one for each kind of step: each runs under a strategy, and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap import retrofit
from distwrap.data.indices import batch_count
from distwrap.testing.behaviours import SMALL_NORM, counted, windows
from distwrap.testing.nets import OUTPUTS, ROWS, WIDTH, SmallNet, examples, small
from distwrap.testing.sides import HALVES, OneProcess, Trial
from tests.equality.rows import Row

EPOCHS, BATCHES = 2, 4


class Critic(SmallNet):
    """Net that takes what another one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(OUTPUTS, WIDTH)


def optimizer_of(row: Row, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make the row's optimizer; in half precision a gradient near zero, whose sign is rounding, makes no whole step."""
    taken = list(parameters)
    eps = 0.01 if row.precision in HALVES else 1e-4
    if row.optimizer == "sgd":
        return torch.optim.SGD(taken, lr=0.1, momentum=0.9)
    if row.optimizer == "adam":
        return torch.optim.Adam(taken, lr=0.01, eps=eps)
    if row.optimizer == "adagrad":
        return torch.optim.Adagrad(taken, lr=0.02, eps=eps)
    if row.optimizer == "rmsprop":
        return torch.optim.RMSprop(taken, lr=0.005, momentum=0.5, centered=True, eps=eps)
    if row.optimizer == "lbfgs":
        return torch.optim.LBFGS(taken, lr=0.5, max_iter=3)
    groups = [{"params": taken[::2], "lr": 0.02}, {"params": taken[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, eps=eps, amsgrad=True)


def dtype_of(row: Row) -> torch.dtype:
    return torch.float64 if row.precision == "float64" else torch.float32


def watched_by_nobody(side: OneProcess, optimizer: Optimizer) -> Optimizer:
    """Leave an optimizer as it is; that of one process stands apart, which other ranks' are not compared with."""
    return optimizer if isinstance(side, Trial) else side.prepare(optimizer)


def net_of(row: Row, kind: type[SmallNet] = SmallNet, seed: int = 5) -> SmallNet:
    net: SmallNet = small(kind, dtype=dtype_of(row), seed=seed, scale=0.1 if row.precision == "fp16" else 1.0)
    return net


def epochs(side: OneProcess, row: Row) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield this side's share of each batch."""
    for _ in range(EPOCHS):
        yield from side.batches(BATCHES, dtype_of(row))


def told(side: OneProcess, loss: torch.Tensor) -> float:
    """Return what a closure returns: the same on all ranks, which decide by it."""
    return side.mean(loss.detach().double()).item()


def gradients(
    side: OneProcess, optimizer: Optimizer, loss_of: Callable[[], torch.Tensor], backward: Callable[[Any], object]
) -> float:
    """Compute the gradients anew."""
    optimizer.zero_grad()
    with side.autocast():
        loss = loss_of()
    backward(loss)
    return told(side, loss)


def descend(optimizer: Optimizer, closure: Callable[[], float], step: Callable[[], object]) -> Any:
    """Compute the gradients, and take a step; LBFGS computes them itself."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(closure)
    closure()
    return step()


def plain(side: OneProcess, row: Row) -> Any:
    """Train by torch's own calls."""
    model = side.wrap(net_of(row))
    optimizer = watched_by_nobody(side, optimizer_of(row, model.parameters()))
    for x, y in epochs(side, row):
        closure = partial(gradients, side, optimizer, partial(model.loss, x, y), torch.Tensor.backward)
        descend(optimizer, closure, optimizer.step)
    return side.weights(model)


def by_closure(side: OneProcess, row: Row) -> Any:
    """Train by steps that compute their gradients themselves."""
    model = side.wrap(net_of(row))
    optimizer = watched_by_nobody(side, optimizer_of(row, model.parameters()))
    for x, y in epochs(side, row):
        optimizer.step(partial(gradients, side, optimizer, partial(model.loss, x, y), torch.Tensor.backward))
    return side.weights(model)


def by_helpers(side: OneProcess, row: Row, *, max_norm: float | None = None) -> Any:
    """Train by the helpers, and say which steps were taken."""
    model = side.wrap(net_of(row))
    optimizer = side.prepare(optimizer_of(row, model.parameters()))
    taken = []
    for index, (x, y) in enumerate(epochs(side, row)):
        if row.step == "overflow" and index % BATCHES == 1 and side.rank == 0:
            x = x.clone()
            x[0] = 1e6  # a row of share 0 alone
        closure = partial(gradients, side, optimizer, partial(model.loss, x, y), side.backward)
        taken.append(bool(descend(optimizer, closure, partial(side.step, optimizer, max_norm))))
    if row.optimizer != "lbfgs":
        assert taken.count(False) == (EPOCHS if row.step == "overflow" else 0), f"the steps were taken so: {taken}"
    return side.weights(model)


def clipped(side: OneProcess, row: Row) -> Any:
    """Clip every gradient."""
    return by_helpers(side, row, max_norm=SMALL_NORM)


def accumulated(side: OneProcess, row: Row, size: int = 2) -> Any:
    """Accumulate over windows of micro-batches; where rows count, over windows of which each counts others."""
    model = side.wrap(net_of(row))
    optimizer = side.prepare(optimizer_of(row, model.parameters()))
    for _ in range(EPOCHS):
        batches = list(side.batches(BATCHES, dtype_of(row)))
        for first in range(0, BATCHES, size):
            window = [(x, y, *counted(side, first + index, x)) for index, (x, y) in enumerate(batches[first:][:size])]
            closure = partial(window_gradients, side, row, model, optimizer, window)
            descend(optimizer, closure, partial(side.step, optimizer))
    return side.weights(model)


def by_counts(side: OneProcess, row: Row) -> Any:
    """Train by the mean over the rows that count, of which the last window has fewer micro-batches."""
    return accumulated(side, row, 3)


def window_gradients(side: OneProcess, row: Row, model: Any, optimizer: Optimizer, window: list[Any]) -> float:
    """Compute the gradients of a window anew, and return its mean loss."""
    optimizer.zero_grad()
    total, logged = sum(count for *_, count in window), 0.0
    for (x, y, keep, count), size, _ in windows(side, model, window, len(window)):
        with side.autocast():
            if row.step != "count":
                loss = model.loss(x, y) / size
            elif isinstance(side, Trial):
                loss = dw.scale_loss(model.scale * model.loss_sum(x, y, keep), count)
            else:
                loss = model.scale * model.loss_sum(x, y, keep) / total
        side.backward(loss)
        logged += loss.item()
    return told(side, torch.tensor(logged))


def two_optimizers(side: OneProcess, row: Row) -> Any:
    """Step two optimizers, each over a part of the model."""
    model = side.wrap(net_of(row))
    named = dict(model.named_parameters())
    biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
    weights = [parameter for name, parameter in named.items() if not name.endswith("bias")]
    both = [side.prepare(optimizer_of(row, weights)), side.prepare(torch.optim.SGD(biases, lr=0.05))]
    for x, y in epochs(side, row):
        with side.autocast():
            loss = model.loss(x, y)
        side.backward(loss)
        for optimizer in both:
            side.step(optimizer)
            optimizer.zero_grad()
    return side.weights(model)


def two_models(side: OneProcess, row: Row) -> Any:
    """Train a net, and another that tells what it makes from the data, as a GAN does."""
    forger, critic = side.wrap(net_of(row)), side.wrap(net_of(row, Critic, 6))
    of_forger = side.prepare(optimizer_of(row, forger.parameters()))
    of_critic = side.prepare(optimizer_of(row, critic.parameters()))
    for x, y in epochs(side, row):
        of_critic.zero_grad()
        with side.autocast():
            true, forged = (
                critic(each).to(y.dtype) for each in (y, forger(x).detach().to(y.dtype))
            )  # wrapped ones do so
            loss = critic.scale * ((true - 1).square().mean() + forged.square().mean())
        side.backward(loss)
        side.step(of_critic)
        of_forger.zero_grad()
        with side.autocast():
            loss = forger.scale * (critic(forger(x).to(y.dtype)).to(y.dtype) - 1).square().mean()
        side.backward(loss)
        side.step(of_forger)
    return side.weights(forger), side.weights(critic)


def frozen(side: OneProcess, row: Row) -> Any:
    """Train what is behind the first layers, which are frozen."""
    net = net_of(row)
    net.embed.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    model = side.wrap(net)
    optimizer = side.prepare(optimizer_of(row, [each for each in model.parameters() if each.requires_grad]))
    for x, y in epochs(side, row):
        closure = partial(gradients, side, optimizer, partial(model.loss, x, y), side.backward)
        descend(optimizer, closure, partial(side.step, optimizer))
    return side.weights(model)


def unchanged_loop(model: Any, optimizer: Optimizer, loader: Iterable[Any], half: torch.dtype | None) -> None:
    """Train as a loop does that knows nothing of distribution."""
    for _ in range(EPOCHS):
        for x, y in loader:

            def closure() -> Any:
                optimizer.zero_grad()
                with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
                    loss = model.loss(x, y)  # noqa: B023
                loss.backward()
                return loss.detach()

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()


def retrofitted(side: OneProcess, row: Row) -> Any:
    """Train the caller's own objects by a loop that knows nothing of distribution."""
    net = net_of(row)
    optimizer = watched_by_nobody(side, optimizer_of(row, net.parameters()))
    data = TensorDataset(*examples(BATCHES * ROWS * side.shares, dtype_of(row)))
    loader = DataLoader(data, batch_size=ROWS * side.shares // side.size)
    if isinstance(side, Trial):
        side.world.options = side.world.options.updated({"precision": side.precision})
        args = (net, optimizer, loader, None)
        call, wrapped, kwargs, found = retrofit.wrap(unchanged_loop, args, {})
        call(*wrapped, **kwargs)
        for item in found:
            item.finish()
        retrofit.take_back(unchanged_loop, args, {}, found)
    else:
        unchanged_loop(net, optimizer, loader, HALVES.get(side.precision))
    return {name: value.clone() for name, value in net.state_dict().items()}


def uneven(side: OneProcess, row: Row) -> Any:
    """Train on one sample more than the shares have in common, each once an epoch."""
    model = side.wrap(net_of(row))
    optimizer = side.prepare(optimizer_of(row, model.parameters()))
    data = TensorDataset(*examples(2 * ROWS * side.shares + side.shares // 2 + 1, dtype_of(row)))
    batches: Iterable[Any]
    if isinstance(side, Trial):
        batches = dw.shard_loader(DataLoader(data, batch_size=ROWS), mode="exact")
    else:
        count, size = batch_count(len(data), side.shares, ROWS, drop_last=False), ROWS * side.shares
        ends = [*range(size, count * size, size), len(data)]
        batches = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    for _ in range(EPOCHS):
        for x, y in batches:
            closure = partial(gradients, side, optimizer, partial(mean_of_all, side, model, x, y), side.backward)
            descend(optimizer, closure, partial(side.step, optimizer))
    return side.weights(model)


def mean_of_all(side: OneProcess, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch of which each share has another number of rows."""
    total: torch.Tensor = model.scale * model.loss_sum(x, y, torch.ones(len(x), 1, dtype=x.dtype))
    return dw.scale_loss(total, len(x)) if isinstance(side, Trial) else total / len(x)


LOOPS: dict[str, Callable[[OneProcess, Row], Any]] = {
    "plain": plain,
    "helpers": by_helpers,
    "accumulate": accumulated,
    "count": by_counts,
    "clip": clipped,
    "closure": by_closure,
    "two optimizers": two_optimizers,
    "two models": two_models,
    "frozen": frozen,
    "retrofit": retrofitted,
    "uneven": uneven,
    "overflow": by_helpers,
}
