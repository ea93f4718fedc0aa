"""The part of a step to which each moment of a loop belongs, in loops of every style, on a clock that the loop sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import distwrap as dw
from distwrap.stopwatch import HostClock
from tests.slow import slow

STEPS, COMPILES = 5, "compiles a model"


class Clock(HostClock):
    """Clock that stands still but for naps."""

    time = 0.0

    def now(self) -> float:
        return self.time


CLOCK = Clock()


def nap(seconds: float = 1.0) -> None:
    CLOCK.time += seconds


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distwrap.timing.recorder.clock_of", lambda device: CLOCK)


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))


class Slow(nn.Module):
    """A net whose forward naps where it has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            nap()
        return self.net(x)  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()  # type: ignore[no-any-return]


class Recomputed(Slow):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class NapBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        nap()
        return grads[0]


class SlowData(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        nap(1 / 4)
        return super().__getitem__(index)


class Files(TensorDataset):
    """Samples that are files, which take a while to load."""

    path = Path()

    def __getitem__(self, index: int) -> Any:
        nap(1 / 4)
        return (torch.load(self.path),)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(4 * STEPS):
            nap(1 / 4)
            yield torch.randn(8)


class Saved:
    """Object that takes a while to save."""

    def state_dict(self) -> dict[str, Any]:
        nap()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def loader(kind: type[TensorDataset] = TensorDataset, batch_size: int = 4, **sharding: Any) -> Any:
    data = kind(torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(0)))
    return dw.shard_loader(DataLoader(data, batch_size=batch_size), **sharding)


def wrapped(module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = dw.wrap_model(module)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(module: nn.Module, batches: Any = None, after: Callable[..., object] = lambda x, model: None) -> None:
    model, optimizer = wrapped(module)
    for batch in loader() if batches is None else batches:
        x = batch if isinstance(batch, torch.Tensor) else batch[0]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if after(x, model):
            break


def by_a_method() -> None:
    model: Any
    model, optimizer = wrapped(Slow())
    for (x,) in loader():
        model.loss(x).backward()
        optimizer.step()


def slow_in_the_backward() -> None:
    model, optimizer = wrapped(net())
    for (x,) in loader():
        NapBackward.apply(model(x)).square().mean().backward()
        optimizer.step()


def accumulated() -> None:
    model, optimizer = wrapped(Slow())
    for (x,), window in dw.accumulate(loader(batch_size=2), 2, model):
        dw.backward(model(x).square().mean() / window.size)
        if window.last:
            dw.optimizer_step(optimizer, max_norm=1.0)


def by_a_generator() -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(STEPS):
            nap()
            yield torch.randn(4, 8)

    train(net(), dw.lockstep(batches()))


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


def of_two_models() -> None:
    (generator, of_generator), (critic, of_critic) = wrapped(Slow()), wrapped(net(1))
    for (x,) in loader():
        made = generator(x)
        (critic(made.detach()).mean() - critic(torch.ones(4, 1)).mean()).backward()
        of_critic.step()
        (-critic(made).mean()).backward()
        of_generator.step()


def with_a_penalty() -> None:
    model, optimizer = wrapped(net())
    for (x,) in loader():
        out = NapBackward.apply(model(x.requires_grad_()))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + slope.square().mean()).backward(retain_graph=True)
        optimizer.step()


def compiled_around() -> None:
    model = torch.compile(dw.wrap_model(net()), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*does not know how to trace")  # what measures it
        for (x,) in loader():
            nap()
            model(x).square().mean().backward()
            optimizer.step()


def compiled_within() -> None:
    train(torch.compile(net(), backend="eager"), after=lambda *_: nap())  # type: ignore[arg-type]


def evaluated() -> None:
    def evaluate(x: torch.Tensor, model: nn.Module) -> None:
        with torch.no_grad():
            for (part,) in DataLoader(TensorDataset(x), batch_size=2):
                model(part)
                nap()

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


def on_a_plateau() -> None:
    model, optimizer = wrapped(Slow())
    scheduler = ReduceLROnPlateau(optimizer)
    for (x,) in loader():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(dw.mean(loss.detach()).item())


def with_steps_that_raise() -> None:
    """The optimizer's part ends with such a step, and the next optimizer's is one."""

    def raises(*_: object) -> None:
        raise ZeroDivisionError

    model, optimizer = wrapped(Slow())
    refused = torch.optim.SGD(model.parameters(), lr=0.01)
    refused.register_step_pre_hook(raises)
    for (x,) in loader():
        with pytest.raises(ZeroDivisionError):
            refused.step()
        model(x).square().mean().backward()
        nap()
        optimizer.step()


def stopped_early() -> None:
    numbers = iter(range(STEPS))
    train(Slow(), after=lambda *_: dw.agree(next(numbers) == STEPS - 2))


def one_first() -> None:
    def first(*_: object) -> None:
        with dw.rank_zero_first():
            nap()

    train(net(), after=first)


def saved(folder: Path) -> None:
    train(net(), after=lambda x, model: dw.save({"model": model, "more": Saved()}, folder / "last.pt"))


def of_files(folder: Path) -> None:
    Files.path = folder / "sample.pt"
    torch.save(torch.ones(8), Files.path)
    train(net(), loader(Files))


LOOPS: tuple[tuple[Callable[..., None], dict[str, float]], ...] = (
    (lambda: train(Slow()), {"forward": 1}),
    (by_a_method, {"forward": 1}),
    (slow_in_the_backward, {"backward": 1}),
    (lambda: train(net(), loader(SlowData)), {"data": 1}),
    (lambda: train(net(), dw.progress(loader(SlowData), disable=True)), {"data": 1}),
    (lambda: train(net(), dw.shard_loader(DataLoader(Stream(), batch_size=4), split="dispatch")), {"data": 1}),
    (by_a_generator, {"data": 1}),
    (accumulated, {"forward": 2}),
    (with_closures, {"own": 1}),
    (of_two_models, {"forward": 1}),
    (with_a_penalty, {"backward": 2}),
    (lambda: train(Recomputed(use_reentrant=False)), {"forward": 1, "backward": 1}),
    (evaluated, {"evaluation": 2}),  # what is between two batches too
    (twice, {"forward": 9 / 8}),  # the step between the two loops has the first step of the second one in it
    (on_a_plateau, {"forward": 1}),
    (with_steps_that_raise, {"forward": 1, "own": 1}),
    (stopped_early, {"forward": 1}),
    (one_first, {"own": 1}),
    (saved, {"checkpoint": 1}),
    (of_files, {"data": 1}),
)
NAMES = (
    *(
        "forward",
        "method",
        "backward",
        "loader",
        "bar",
        "dispatched",
        "generator",
        "accumulated",
        "closures",
        "two models",
    ),
    *(
        "penalty",
        "recomputed",
        "evaluated",
        "twice",
        "plateau",
        "raising",
        "stopped early",
        "one first",
        "saved",
        "files",
    ),
)


@pytest.mark.parametrize(
    ("loop", "seconds"),
    [
        *(pytest.param(*each, id=name) for each, name in zip(LOOPS, NAMES, strict=True)),
        slow(compiled_around, {"own": 1}, why=COMPILES),
        slow(compiled_within, {"own": 1}, why=COMPILES),
    ],
)
def test_each_moment_belongs_to_a_part(loop: Callable[..., None], seconds: dict[str, float], tmp_path: Path) -> None:
    """The parts of a step have the seconds that the loop spent in them, and no others; samples are counted once."""
    with dw.report() as found:
        loop(tmp_path) if loop in (saved, of_files) else loop()
    figures = found.figures
    steps = {twice: 2 * STEPS - 2, stopped_early: STEPS - 2}.get(loop, STEPS - 1)
    assert figures["steps"] == steps
    assert {name: spent for name, spent in figures["parts"].items() if spent} == pytest.approx(seconds)
    assert figures["ranks"][0]["samples"] == (4.5 if loop is twice else 4)


def test_a_copy_that_is_made_ahead_of_its_step() -> None:
    """It is data all the same, one step earlier."""
    with dw.report() as found:
        train(net(), loader(SlowData, copy_ahead=True))
    parts = {name for name, spent in found.figures["parts"].items() if spent}
    assert parts == {"data"}


def test_a_reentrant_checkpoint() -> None:
    """Its forward runs without gradients first, and takes its time in the backward."""
    with dw.report() as found:
        train(Recomputed(use_reentrant=True))
    assert found.figures["parts"]["backward"] == pytest.approx(1)


def test_loops_without_steps() -> None:
    """There is nothing to tell of them."""
    model, _ = wrapped(net())
    with dw.report() as found:
        for (x,) in loader():
            model(x).square().mean().backward()
            for parameter in model.parameters():
                parameter.data -= 0.01 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    assert found.figures == {}


def test_what_a_loader_is_set_to() -> None:
    """The workers of a loader are read from it."""
    workers: Dataset[Any] = TensorDataset(torch.randn(4 * STEPS, 8))
    with dw.report() as found:
        train(net(), dw.shard_loader(DataLoader(workers, batch_size=4, num_workers=1)))
    assert found.figures["ranks"][0]["workers"] == 1
