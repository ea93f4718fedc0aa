"""Optimizers that treat each parameter by itself may be divided; those that take a norm over all are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError
from distwrap.strategies.separable import refuse_mixing
from tests.slow import few


class Plain(torch.optim.Optimizer):
    """Sign descent, with a count that is the optimizer's own."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.calls += 1
        torch.rand(1)
        with torch.no_grad():
            self.move([(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None])
        return loss

    def move(self, held: list[Any]) -> None:
        for group, p in held:
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.sub_(group["lr"] * p.grad.sign())


class Normed(Plain):
    """Step of one length for all parameters together, as LAMB's first clip."""

    def move(self, held: list[Any]) -> None:
        norm = torch.stack([p.grad.norm() for _, p in held]).norm()
        for group, p in held:
            p.sub_(group["lr"] * p.grad / norm)


class Clipped(Plain):
    """Clip over all that seldom acts."""

    def move(self, held: list[Any]) -> None:
        norm = float(torch.stack([p.grad.norm() for _, p in held]).norm())
        for group, p in held:
            p.sub_(group["lr"] * p.grad * min(1.0, 50.0 / norm))


class Trusting(Plain):
    """Step by the norm of each weight, as LARS and LAMB."""

    def move(self, held: list[Any]) -> None:
        for group, p in held:
            p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


class Noisy(Plain):
    def move(self, held: list[Any]) -> None:
        for group, p in held:
            p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


class Momentum(torch.optim.SGD):
    """Subclass of torch's that steps by its parent's step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Estimating(Plain):
    """Rate from what the gradients have added up to, as of optimizers that need no rate; it begins with nothing."""

    def move(self, held: list[Any]) -> None:
        self.total = getattr(self, "total", 0.0)
        for _, p in held:
            p.sub_(min(self.total, 1.0) * p.grad.sign())
        self.total += sum(float(p.grad.norm()) for _, p in held) * 1e-6


class Sharpness(Plain):
    """Sharpness-aware step around another optimizer; it needs a closure, and shares the other's groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        closure()
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        with torch.no_grad():
            for p in held:
                p.add_(0.05 * p.grad / norm)
            loss = closure()
            for p in held:
                p.sub_(0.05 * p.grad / norm)
        self.base.step()
        return loss


class Needing(Plain):
    """Optimizer that cannot be tried."""

    def move(self, held: list[Any]) -> None:
        raise KeyError("what the loop has not told yet")


def made(kind: Callable[..., Any], groups: int = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 20) for _ in range(groups)))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return kind([{"params": list(layer.parameters())} for layer in net], lr=0.01, **options)


@pytest.mark.parametrize("kind", [Plain, Trusting, Momentum, Needing, torch.optim.AdamW])
@pytest.mark.parametrize("groups", [1, 5])
def test_an_optimizer_of_each_parameter_by_itself_is_taken(kind: Any, groups: int) -> None:
    """Whatever it draws for all of them, with as many groups as there are layers; and one that cannot be tried."""
    refuse_mixing(made(kind, groups))


@pytest.mark.parametrize("groups", [1, 5])
def test_an_optimizer_that_draws_for_each_parameter_is_refused(groups: int) -> None:
    """Ranks that step other parameters would draw apart from then on."""
    with pytest.raises(ModelError, match="draws random"):
        refuse_mixing(made(Noisy, groups))


@pytest.mark.parametrize("kind", [Normed, Clipped, Estimating, Sharpness])
@pytest.mark.parametrize("groups", [1, 5])
def test_an_optimizer_of_all_gradients_is_refused(kind: Any, groups: int) -> None:
    """By its class, with what to do."""
    with pytest.raises(ModelError, match=rf"{kind.__name__} steps by all gradients.*max_norm=.*strategy='ddp'"):
        refuse_mixing(made(kind, groups))


def test_one_vector_alone_is_tried_beside_another() -> None:
    """A single parameter tells nothing."""
    with pytest.raises(ModelError, match="Normed"):
        refuse_mixing(Normed([nn.Parameter(torch.ones(3))]))


def test_a_rate_of_nothing_hides_nothing() -> None:
    """As a warm-up begins with."""
    with pytest.raises(ModelError, match="Normed"):
        refuse_mixing(Normed([nn.Parameter(torch.ones(3))], lr=0.0))


@pytest.mark.parametrize("kind", [Plain, Momentum, Normed])
def test_a_trial_leaves_everything_as_it_was(kind: Any) -> None:
    """Numbers, gradients, state, groups, the optimizer's own counts, the random state, schedules and hooks."""
    optimizer, calls = made(kind, 2), list[str]()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in held]
    before = copy.deepcopy((held, optimizer.state_dict(), getattr(optimizer, "calls", 0), optimizer._opt_called))
    optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
    everyones = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    random = torch.random.get_rng_state()
    try:
        try:
            refuse_mixing(optimizer)
        except ModelError:
            assert kind is Normed
        assert not calls
        optimizer_state = optimizer.state_dict()
        assert torch.equal(random, torch.random.get_rng_state())
        assert all(p.grad is grad for p, grad in zip(held, grads, strict=True))
        assert all(torch.equal(p, old) for p, old in zip(held, before[0], strict=True))
        assert (optimizer_state, getattr(optimizer, "calls", 0), optimizer._opt_called) == before[1:]
        optimizer.step()
        schedule.step()
        assert calls == ["all", "own"] or kind is Momentum
    finally:
        everyones.remove()


def _stepped(kind: Any) -> None:
    model = dw.wrap_model(nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))))
    optimizer = kind(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", few(["zero1", "pipeline"], 1))
def test_what_divides_the_steps_looks_before_the_first(strategy: str) -> None:
    """Also where nobody has prepared the optimizer."""
    run = distributed(strategy=strategy, nprocs=2, timeout=60)(_stepped)
    run(Trusting)
    with pytest.raises(ModelError, match="all gradients"):
        run(Normed)
