"""Behaviours of gradients between backward and step: accumulation, scaling by count, clipping, hooks."""

from typing import Any

import torch
from torch import nn

from distwrap.errors import ModelError
from distwrap.strategies.accumulation import accumulate
from distwrap.testing.behaviours import SMALL_NORM, accumulated, clipped, scaled
from distwrap.testing.nets import small
from distwrap.testing.sides import OneProcess, Trial, adamw, sgd
from tests.conformance.base import behaviour


@behaviour()
def accumulate_micro_batches(trial: Trial) -> None:
    """Accumulate gradients over windows of two micro-batches."""
    trial.same(accumulated)


@behaviour()
def accumulate_and_clip(trial: Trial) -> None:
    """Clip what a window has accumulated, once."""
    trial.same(lambda side: accumulated(side, max_norm=SMALL_NORM))


@behaviour()
def no_step_within_a_window(trial: Trial) -> None:
    """Refuse a step before the last micro-batch of a window, by a `ModelError`."""
    model = trial.wrap(small())
    optimizer = trial.prepare(sgd(model.parameters()))
    loop = iter(accumulate(list(trial.batches(2)), 2, model))
    (x, y), _ = next(loop)
    trial.backward(model.loss(x, y))
    try:
        trial.step(optimizer)
    except ModelError:
        return
    finally:
        loop.close()  # type: ignore[attr-defined]
    raise AssertionError("a step in the middle of a window was taken")


@behaviour()
def scale_loss_over_windows(trial: Trial) -> None:
    """Train by the mean over all rows that count in a window, of which each micro-batch has another number."""
    trial.same(lambda side: scaled(side, 3, adamw))


@behaviour()
def clip_in_optimizer_step(trial: Trial) -> None:
    """Clip by `optimizer_step`, over the whole model, and tell the norm before."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer, norms = side.prepare(sgd(model.parameters())), []
        for x, y in side.batches():
            side.backward(model.loss(x, y))
            norms.append(side.step(optimizer, SMALL_NORM).norm)
            optimizer.zero_grad()
        return side.weights(model), norms

    trial.same(loop)


@behaviour()
def torchs_own_clip(trial: Trial) -> None:
    """Clip by ``torch.nn.utils.clip_grad_norm_``, which returns the norm of the whole gradient."""
    trial.same(lambda side: clipped(side, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), SMALL_NORM)))


@behaviour()
def gradient_hooks(trial: Trial) -> None:
    """Change gradients by a hook on each parameter."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches():
            side.backward(model.loss(x, y))
            side.step(optimizer)
            optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)


@behaviour()
def step_hooks(trial: Trial) -> None:
    """Call the hooks that the user has put before and after the optimizer's steps."""
    model = trial.wrap(small())
    optimizer = trial.prepare(sgd(model.parameters()))
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for x, y in trial.batches():
        trial.backward(model.loss(x, y))
        trial.step(optimizer)
        optimizer.zero_grad()
    assert called == ["before", "after"] * 2, f"the hooks around two steps were called so: {called}"


@behaviour()
def gradients_are_averaged(trial: Trial) -> None:
    """Hand out what has accumulated as tensors that can be rescaled in place before a step."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small())
        optimizer = side.prepare(sgd(model.parameters()))
        for x, y in side.batches():
            side.backward(model.loss(x, y))
            with torch.no_grad():
                found = side.strategy.gradients(model) if isinstance(side, Trial) else None
                for gradient in [each.grad for each in model.parameters()] if found is None else found:
                    gradient.mul_(0.5)
            side.step(optimizer)
            optimizer.zero_grad()
        return side.weights(model)

    trial.same(loop)
