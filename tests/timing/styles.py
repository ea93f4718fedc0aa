"""Styles of loops, each slow on purpose on one rank; what ends a step is told to `ENDS`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import distwrap as dw

LONG, STEPS = 0.15, 5
ENDS: list[float] = []


def nap(rank: int = 1, seconds: float = LONG) -> None:
    if dw.rank() == rank:
        time.sleep(seconds)


def end(optimizer: Any) -> None:
    optimizer.zero_grad()
    ENDS.append(time.perf_counter())


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))


class Slow(nn.Module):
    """A net whose forward sleeps where it has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            nap()
        return self.net(x)  # type: ignore[no-any-return]


class Recomputed(Slow):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.use_reentrant:
            nap()  # so that it is slower than its recomputation
        x = x.requires_grad_()
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class SlowData(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        nap(seconds=LONG / 4)
        return super().__getitem__(index)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(2 * 4 * STEPS):
            time.sleep(LONG / 8)
            yield torch.randn(8)


def data(kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    return kind(torch.randn(2 * 4 * STEPS, 8, generator=torch.Generator().manual_seed(0)))


def loader(dataset: Dataset[Any] | None = None, batch_size: int = 4, sharding: Any = None, **how: Any) -> Any:
    own = data() if dataset is None else dataset
    return dw.shard_loader(DataLoader(own, batch_size=batch_size, **how), **(sharding or {}))


def wrapped(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = dw.wrap_model(module)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(module: nn.Module | None = None, batches: Any = None, after: Any = lambda x, model, loss: None) -> None:
    model, optimizer = wrapped(Slow() if module is None else module)
    for batch in loader() if batches is None else batches:
        x = batch if isinstance(batch, torch.Tensor) else batch[0]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        end(optimizer)
        if after(x, model, loss):
            break


def accumulated() -> None:
    model, optimizer = wrapped(Slow())
    for (x,), window in dw.accumulate(loader(batch_size=2), 2, model):
        dw.backward(model(x).square().mean() / window.size)
        if window.last:
            dw.optimizer_step(optimizer)
            end(optimizer)


def in_lockstep() -> None:
    train(batches=dw.lockstep([torch.randn(4, 8)] * (STEPS + dw.rank())))


def by_a_generator() -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(STEPS):
            nap()
            yield torch.randn(4, 8, generator=dw.rank_generator(0))

    train(net(), dw.lockstep(batches()))


def joined() -> None:
    model, optimizer = wrapped(Slow())
    with Join([model]):  # type: ignore[list-item]
        for _ in range(STEPS - dw.rank()):
            model(torch.randn(4, 8, generator=dw.rank_generator(0))).square().mean().backward()
            optimizer.step()
            end(optimizer)


def by_helpers() -> None:
    model, optimizer = wrapped(Slow())
    for (x,) in loader():
        dw.backward(model(x).float().square().mean())
        dw.optimizer_step(optimizer, max_norm=1.0)
        end(optimizer)


def with_closures() -> None:
    model = dw.wrap_model(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    for (x,) in loader():

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            nap()
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
        end(optimizer)


def of_two_models() -> None:
    (generator, of_generator), (critic, of_critic) = wrapped(Slow()), wrapped(net(1))
    for (x,) in loader():
        made = generator(x)
        (critic(made.detach()).mean() - critic(torch.ones(4, 1)).mean()).backward()
        of_critic.step()
        end(of_critic)
        (-critic(made).mean()).backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()


def with_a_penalty() -> None:
    model, optimizer = wrapped(Slow())
    for (x,) in loader():
        out = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + slope.square().mean()).backward(retain_graph=True)
        optimizer.step()
        end(optimizer)


def compiled_around() -> None:
    model = torch.compile(dw.wrap_model(net()), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*does not know how to trace")  # what measures it
        for (x,) in loader():
            nap()
            model(x).square().mean().backward()
            optimizer.step()
            end(optimizer)


def compiled_within() -> None:
    train(torch.compile(net(), backend="eager"), after=lambda *_: nap())  # type: ignore[arg-type]


def evaluated() -> None:
    def evaluate(x: torch.Tensor, model: nn.Module, loss: torch.Tensor) -> None:
        with torch.no_grad():
            for (part,) in DataLoader(TensorDataset(x), batch_size=2):
                nap(seconds=LONG / 2)
                model(part)

    train(net(), after=evaluate)


def twice() -> None:
    held = []  # as a scheduler does, with which an optimizer is in a circle
    for _ in range(2):
        model, optimizer = wrapped(Slow())
        scheduler = StepLR(optimizer, 2)
        held.append(optimizer)
        for (x,) in loader():
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            end(optimizer)


def on_a_plateau() -> None:
    model, optimizer = wrapped(Slow())
    scheduler = ReduceLROnPlateau(optimizer)
    for (x,) in loader():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        end(optimizer)
        scheduler.step(dw.mean(loss.detach()).item())


def stopped_early() -> None:
    train(after=lambda *_: dw.agree(len(ENDS) == STEPS - 1 and dw.rank() == 0))


def one_first() -> None:
    def first(*_: object) -> None:
        with dw.rank_zero_first():
            nap(0)

    train(net(), after=first)


def by_workers() -> None:
    train(net(), loader(data(SlowData), num_workers=1))


def copied_ahead() -> None:
    train(net(), loader(data(SlowData), sharding={"copy_ahead": True}))


def dispatched() -> None:
    train(net(), loader(Stream(), sharding={"split": "dispatch"}))


def with_a_bar() -> None:
    train(net(), dw.progress(loader(data(SlowData))))


def recomputed() -> None:
    train(Recomputed(use_reentrant=False))


def recomputed_reentrantly() -> None:
    train(Recomputed(use_reentrant=True))


def no_step() -> None:
    wrapped(net())


def without_an_optimizer() -> None:
    model, _ = wrapped(net())
    for (x,) in loader():
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.01 * parameter.grad  # type: ignore[operator]
            parameter.grad = None
