"""Behaviours of optimizers: which ones, made when, over which parameters."""

from typing import Any

import torch

from distwrap.strategies import wrap_optimizer
from distwrap.strategies.steps import optimizer_step
from distwrap.testing.nets import TOLERANCES, small
from distwrap.testing.sides import OneProcess, Trial, adamw, epoch, fit, sgd
from tests.conformance.base import behaviour


@behaviour()
def sgd_with_momentum(trial: Trial) -> None:
    """Train by SGD with momentum over three epochs, as one process does."""
    trial.same(fit)


@behaviour()
def sgd_in_float32(trial: Trial) -> None:
    """Train in float32 over three epochs, as one process does."""
    trial.same(lambda side: fit(side, dtype=torch.float32), tolerance=TOLERANCES[torch.float32])


@behaviour()
def lbfgs(trial: Trial) -> None:
    """Train by LBFGS, whose closure computes the loss several times a step."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))
        for x, y in side.batches():

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
                optimizer.zero_grad()
                loss = model.loss(x, y)
                side.backward(loss)
                return side.mean(loss.detach()).item()

            optimizer.step(closure)
        return side.weights(model)

    trial.same(loop)


class AveragingSGD(torch.optim.Optimizer):
    """SGD along averages of the gradients, which are corrected by the count of steps; `state` holds none of it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.steps = 0
        self.averages: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.averages.setdefault(parameter, torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 0.1)
                parameter.sub_(average, alpha=group["lr"] / (1 - 0.9**self.steps))


@behaviour()
def state_outside_of_state(trial: Trial) -> None:
    """Train by an optimizer that keeps what it knows in attributes of its own, and not in ``.state``."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return wrap_optimizer(AveragingSGD(parameters, lr=0.05), scope="element")

    trial.same(lambda side: fit(side, make))


@behaviour()
def made_before_wrapping(trial: Trial) -> None:
    """Make the optimizer of the plain model's parameters, and wrap the model then."""

    def loop(side: OneProcess) -> Any:
        net = small()
        optimizer = adamw(net.parameters())
        model = side.wrap(net)
        optimizer = side.prepare(optimizer)
        epoch(side, model, optimizer)
        return side.weights(model)

    trial.same(loop)


@behaviour()
def never_prepared(trial: Trial) -> None:
    """Make the optimizer of the wrapped model's parameters, without `wrap_optimizer`."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = adamw(model.parameters())
        epoch(side, model, optimizer)
        return side.weights(model)

    trial.same(loop)


@behaviour()
def two_optimizers(trial: Trial) -> None:
    """Step two optimizers, each over a part of the model."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        named = dict(model.named_parameters())
        biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
        weights = [parameter for name, parameter in named.items() if not name.endswith("bias")]
        optimizers = [side.prepare(adamw(weights)), side.prepare(sgd(biases))]
        for x, y in side.batches():
            side.backward(model.loss(x, y))
            for optimizer in optimizers:
                side.step(optimizer)
                optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)


@behaviour()
def parameter_groups(trial: Trial) -> None:
    """Train groups of parameters at rates and weight decays of their own."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        named = dict(model.named_parameters())
        biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
        weights = [parameter for name, parameter in named.items() if not name.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]
        optimizer = side.prepare(torch.optim.AdamW(groups, lr=0.01))
        epoch(side, model, optimizer)
        return side.weights(model)

    trial.same(loop)


@behaviour()
def group_added_later(trial: Trial) -> None:
    """Add a group of parameters to an optimizer that has stepped already."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        named = dict(model.named_parameters())
        optimizer = side.prepare(adamw([each for name, each in named.items() if not name.endswith("bias")]))
        epoch(side, model, optimizer)
        model.zero_grad()
        optimizer.add_param_group({"params": [each for name, each in named.items() if name.endswith("bias")]})
        epoch(side, model, optimizer)
        return side.weights(model)

    trial.same(loop)


@behaviour()
def scheduler(trial: Trial) -> None:
    """Change the learning rate by a scheduler that is stepped by hand."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(adamw(model.parameters()))
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            epoch(side, model, optimizer)
            rates.step()
        return side.weights(model), rates.get_last_lr()

    trial.same(loop)


@behaviour()
def scheduler_of_a_step(trial: Trial) -> None:
    """Let `optimizer_step` step the scheduler too."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for x, y in side.batches(4):
            side.backward(model.loss(x, y))
            if isinstance(side, Trial):
                assert optimizer_step(optimizer, scheduler=rates), "no step was taken"
            else:
                side.step(optimizer)
                rates.step()
            optimizer.zero_grad()
        return side.weights(model), rates.get_last_lr()

    trial.same(loop)


@behaviour()
def zero_grad_to_none(trial: Trial) -> None:
    """Take gradients away by ``zero_grad(set_to_none=True)``, of the optimizer and of the model."""
    trial.same(lambda side: _zeroed(side, set_to_none=True))


@behaviour()
def zero_grad_to_zeros(trial: Trial) -> None:
    """Set gradients to zero by ``zero_grad(set_to_none=False)``, of the optimizer and of the model."""
    trial.same(lambda side: _zeroed(side, set_to_none=False))


def _zeroed(side: OneProcess, *, set_to_none: bool) -> Any:
    model = side.wrap(small())
    optimizer = side.prepare(adamw(model.parameters()))
    for index, (x, y) in enumerate(side.batches(4)):
        (optimizer if index % 2 else model).zero_grad(set_to_none=set_to_none)
        side.backward(model.loss(x, y))
        side.step(optimizer)
    return side.weights(model)
