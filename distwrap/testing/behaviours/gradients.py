"""Behaviours of gradients between backward and step: accumulation, scaling by count, clipping, hooks."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from distwrap.errors import ModelError
from distwrap.strategies.accumulation import accumulate
from distwrap.strategies.windows import scale_loss
from distwrap.testing.behaviours.base import behaviour
from distwrap.testing.behaviours.nets import small
from distwrap.testing.behaviours.sides import OneProcess, Trial, adamw, compare, sgd

SMALL_NORM = 0.05  # to which every gradient of these nets must be cut


def windows(side: OneProcess, model: Any, batches: list[Any], steps: int) -> Iterator[tuple[Any, int, bool]]:
    """Yield each micro-batch, its window's size, and whether it is the last one."""
    if isinstance(side, Trial):
        for batch, window in accumulate(batches, steps, model):
            yield batch, window.size, window.last
        return
    left = iter(batches)
    while taken := list(islice(left, steps)):
        for index, batch in enumerate(taken):
            yield batch, len(taken), index == len(taken) - 1


def accumulated(side: OneProcess, steps: int = 2, count: int = 4, max_norm: float | None = None) -> Any:
    """Train by windows of micro-batches."""
    model = side.wrap(small())
    optimizer = side.prepare(adamw(model.parameters()))
    for (x, y), size, last in windows(side, model, list(side.batches(count)), steps):
        side.backward(model.loss(x, y) / size)
        if last:
            side.step(optimizer, max_norm)
            optimizer.zero_grad()
    return side.weights(model)


@behaviour()
def accumulate_micro_batches(trial: Trial) -> None:
    """Accumulate gradients over windows of two micro-batches."""
    trial.same(accumulated)


@behaviour()
def accumulate_a_short_window(trial: Trial) -> None:
    """Accumulate over windows of which the last one is shorter."""
    trial.same(lambda side: accumulated(side, steps=3))


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


def counted(side: OneProcess, index: int, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return which rows of a micro-batch count, another number in each share's, and how many."""
    counts = [1 + (3 * index + share) % 5 for share in range(side.shares)]
    whole = torch.zeros(len(x) * side.size, 1, dtype=x.dtype)
    for share, count in enumerate(counts):
        whole[share :: side.shares][:count] = 1
    keep = side.share(whole)
    return keep, int(keep.sum())


def scaled(side: OneProcess, steps: int, make: Callable[[Any], Any] = adamw) -> Any:
    """Train by the mean over rows of which shares and micro-batches have other numbers."""
    model = side.wrap(small())
    optimizer = side.prepare(make(model.parameters()))
    batches = [(x, y, *counted(side, index, x)) for index, (x, y) in enumerate(side.batches(4))]
    for first in range(0, len(batches), steps):
        window = batches[first : first + steps]
        total = sum(count for *_, count in window)
        for (x, y, keep, count), _, last in windows(side, model, window, steps):
            loss = model.loss_sum(x, y, keep)
            side.backward(scale_loss(loss, count) if isinstance(side, Trial) else loss / total)
            if last:
                side.step(optimizer)
                optimizer.zero_grad()
    return side.weights(model)


@behaviour()
def scale_loss_by_count(trial: Trial) -> None:
    """Train by the mean over all rows that count, of which each share has another number."""
    trial.same(lambda side: scaled(side, 1, sgd))


@behaviour()
def scale_loss_over_windows(trial: Trial) -> None:
    """Train by the mean over all rows that count in a window, of which each micro-batch has another number."""
    trial.same(lambda side: scaled(side, 3))


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


def _clipped(side: OneProcess, clip: Callable[[Any, Any], Any]) -> Any:
    """Train by clipped gradients; return the weights, and the norms before."""
    model = side.wrap(small())
    optimizer = side.prepare(sgd(model.parameters()))
    norms = []
    for x, y in side.batches():
        side.backward(model.loss(x, y))
        norm = clip(optimizer, model)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(model), norms


@behaviour()
def clip_tells_the_norm(trial: Trial) -> None:
    """Return from the strategy's own clip the norm of the whole gradient, whatever part of it is here."""
    found = _clipped(trial, lambda optimizer, _: trial.clip(optimizer, SMALL_NORM))
    if found[1][0] is None:
        found = found[0], []  # an engine that clips in its step does not know it yet
    expected = _clipped(trial.alone, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), SMALL_NORM))
    compare(found, (expected[0], expected[1][: len(found[1])]))


@behaviour()
def torchs_own_clip(trial: Trial) -> None:
    """Clip by ``torch.nn.utils.clip_grad_norm_``, which returns the norm of the whole gradient."""
    trial.same(lambda side: _clipped(side, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), SMALL_NORM)))


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
