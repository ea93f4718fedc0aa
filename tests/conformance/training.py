"""Behaviours of a training loop: forwards, backwards, and nets of every kind."""

from typing import Any

import torch
from torch import nn

from distwrap.testing.nets import OUTPUTS, WIDTH, SmallNet, small
from distwrap.testing.sides import OneProcess, Trial, compare, epoch, fit, sgd
from tests.conformance.base import behaviour


@behaviour()
def plain_backward_and_step(trial: Trial) -> None:
    """Train by the user's own ``loss.backward()`` and ``optimizer.step()``."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches():
            model.loss(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)


@behaviour()
def forward_and_criterion(trial: Trial) -> None:
    """Train by ``model(x)`` and a loss that the loop computes."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches():
            side.backward(nn.functional.mse_loss(model(x), y))
            side.step(optimizer)
            optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)


class TaughtNet(SmallNet):
    """Net with a method whose arguments and results are nested."""

    def distilled(self, batch: dict[str, torch.Tensor], *, weight: float) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a loss, and what a loop logs beside it."""
        outputs = self(batch["x"])
        loss = nn.functional.mse_loss(outputs, batch["y"])
        return loss + weight * outputs.abs().mean(), {"loss": loss.detach()}


@behaviour()
def any_method_trains(trial: Trial) -> None:
    """Train by a method of any name, with nested arguments and results."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small(TaughtNet))
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches():
            loss, logged = model.distilled({"x": x, "y": y}, weight=0.1)
            side.backward(loss)
            side.step(optimizer)
            optimizer.zero_grad()
        return side.weights(model), side.mean(logged["loss"])

    trial.same(loop)


@behaviour()
def two_forwards_one_backward(trial: Trial) -> None:
    """Add the losses of two forwards, and compute the gradients of the sum."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches():
            side.backward(model.loss(x, y) + model.loss(x.flip(1), y))
            side.step(optimizer)
            optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)


@behaviour()
def two_backwards_one_step(trial: Trial) -> None:
    """Compute gradients twice before a step: they add up."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches():
            side.backward(model.loss(x, y))
            side.backward(model.loss(x.flip(1), y))
            side.step(optimizer)
            optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)


@behaviour()
def unlike_starts(trial: Trial) -> None:
    """Let every rank make other weights: all train rank 0's."""

    def loop(side: OneProcess) -> Any:
        rank = side.world.placement.rank if isinstance(side, Trial) else 0
        return fit(side, model=side.wrap(small(seed=5 + rank)), epochs=1)

    trial.same(loop)


class FrozenNet(SmallNet):
    """Net of which the first layer, and a norm's weight, are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[1].norm.weight.requires_grad_(False)  # type: ignore[union-attr]


@behaviour()
def frozen_parameters(trial: Trial) -> None:
    """Train a part of the parameters; the others stay as they are."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small(FrozenNet))
        optimizer = side.prepare(sgd(parameter for parameter in model.parameters() if parameter.requires_grad))
        epoch(side, model, optimizer)
        return side.weights(model)

    trial.same(loop)


class TiedNet(SmallNet):
    """Net with one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].linear1.weight = self.blocks[0].linear1.weight  # type: ignore[union-attr]


@behaviour()
def tied_weights(trial: Trial) -> None:
    """Train a parameter that stands in two places: it stays one, and its gradients add up."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small(TiedNet))
        optimizer = side.prepare(sgd(model.parameters()))
        epoch(side, model, optimizer)
        return side.weights(model), [name for name, _ in model.named_parameters()]

    (found, names), (expected, others) = loop(trial), loop(trial.alone)
    compare(found, expected)
    assert names == others, f"the parameters are {names}, and in one process {others}"


class SparingNet(SmallNet):
    """Net with a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, OUTPUTS)


@behaviour(may_refuse=True)
def unused_parameters(trial: Trial) -> None:
    """Leave a layer out of the forward: it is not trained, or the error names it."""
    trial.same(lambda side: fit(side, model=side.wrap(small(SparingNet)), epochs=2))


@behaviour()
def no_trainable_parameters(trial: Trial) -> None:
    """Wrap a model that is not trained, as a teacher: it computes what rank 0's does."""

    def loop(side: OneProcess) -> Any:
        rank = side.world.placement.rank if isinstance(side, Trial) else 0
        model = side.wrap(small(seed=5 + rank).requires_grad_(False))
        with torch.no_grad():
            return [side.mean(model(x).sum()) * side.size for x, _ in side.batches()]

    trial.same(loop)


@behaviour()
def two_models(trial: Trial) -> None:
    """Train two models in turn, each with an optimizer of its own, as of a generator and a critic."""

    def loop(side: OneProcess) -> Any:
        models = [side.wrap(small(seed=seed)) for seed in (5, 6)]
        optimizers = [side.prepare(sgd(model.parameters())) for model in models]
        for x, y in side.batches():
            for model, optimizer in zip(models, optimizers, strict=True):
                side.backward(model.loss(x, y))
                side.step(optimizer)
                optimizer.zero_grad()
        return [side.weights(model) for model in models]

    trial.same(loop)


@behaviour()
def changed_by_hand(trial: Trial) -> None:
    """Change parameters under ``no_grad()`` between steps, alike on all ranks: training goes on from there."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        for _ in range(2):
            epoch(side, model, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        return side.weights(model)

    trial.same(loop)


@behaviour()
def evaluation_between_epochs(trial: Trial) -> None:
    """Evaluate on every rank after each epoch, and train on."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        losses = []
        for _ in range(2):
            model.train()
            epoch(side, model, optimizer)
            model.eval()
            with torch.no_grad():
                losses += [side.mean(model.loss(x, y)) for x, y in side.batches()]
        return side.weights(model), losses

    trial.same(loop)
