"""The ten behaviours that any strategy must show or refuse; each proves one thing that a hand-written loop does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap.checkpoint import load, save
from distwrap.data import shard_loader
from distwrap.group.collectives import gather_object
from distwrap.model import assert_in_sync
from distwrap.model.wrapped_models import bound_strategy
from distwrap.strategies.accumulation import accumulate
from distwrap.strategies.windows import scale_loss
from distwrap.testing.nets import small
from distwrap.testing.sides import OneProcess, Trial, adamw, compare, epoch, fit, sgd

SMALL_NORM = 0.05  # to which every gradient of these nets must be cut

# Of weights in float32 after some steps at a rate of 0.1, whose gradients are sums of rows that were rounded to 11
# bits, and that each rank adds up for itself.
FP16_TOLERANCE = 2e-3
FP16_SCALE = 0.1  # of losses, so that no gradient of one share overflows at torch's first scale of 65536


@dataclass(frozen=True)
class Behaviour:
    """One behaviour of a strategy.

    Attributes:
        body: raises where the strategy behaves otherwise, and a `ModelError`, `OptionError` or `PrecisionError` where
            it refuses.
        may_refuse: whether every strategy may refuse it by name, also by a `CollectiveError` that is no timeout.
    """

    body: Callable[..., None]
    may_refuse: bool = False


def adamw_in_float64(trial: Trial) -> None:
    """Train by AdamW over three epochs, as one process does."""
    trial.same(lambda side: fit(side, adamw))


def clip_tells_the_norm(trial: Trial) -> None:
    """Return from the strategy's own clip the norm of the whole gradient, whatever part of it is here."""
    found = clipped(trial, lambda optimizer, _: trial.clip(optimizer, SMALL_NORM))
    if found[1][0] is None:
        found = found[0], []  # an engine that clips in its step does not know it yet
    expected = clipped(trial.alone, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), SMALL_NORM))
    compare(found, (expected[0], expected[1][: len(found[1])]))


def clipped(side: OneProcess, clip: Callable[[Any, Any], Any]) -> tuple[Any, list[Any]]:
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


def accumulate_a_short_window(trial: Trial) -> None:
    """Accumulate over windows of which the last one is shorter."""
    trial.same(lambda side: accumulated(side, steps=3))


def accumulated(side: OneProcess, steps: int = 2, max_norm: float | None = None) -> Any:
    """Train by windows of micro-batches."""
    model = side.wrap(small())
    optimizer = side.prepare(adamw(model.parameters()))
    for (x, y), size, last in windows(side, model, list(side.batches(4)), steps):
        side.backward(model.loss(x, y) / size)
        if last:
            side.step(optimizer, max_norm)
            optimizer.zero_grad()
    return side.weights(model)


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


def scale_loss_by_count(trial: Trial) -> None:
    """Train by the mean over all rows that count, of which each share has another number."""
    trial.same(lambda side: scaled(side, 1, sgd))


def scaled(side: OneProcess, steps: int, make: Callable[[Any], Any]) -> Any:
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


def counted(side: OneProcess, index: int, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return which rows of a micro-batch count, another number in each share's, and how many."""
    whole = torch.zeros(len(x) * side.size, 1, dtype=x.dtype)
    for share in range(side.shares):
        whole[share :: side.shares][: 1 + (3 * index + share) % 5] = 1
    keep = side.share(whole)
    return keep, int(keep.sum())


def fp16_overflow(trial: Trial) -> None:
    """Skip the step on all ranks where the gradients of one share overflow, and halve the scale."""

    def loop(side: OneProcess) -> Any:
        model = side.wrap(small(dtype=torch.float32, scale=FP16_SCALE))
        optimizer = side.prepare(sgd(model.parameters()))
        taken = []
        for index, whole in enumerate(side.alone.batches(4, torch.float32)):
            x, y = whole[0].clone(), whole[1]
            if index == 1:
                x[0] = 1e6  # a row of share 0 alone
            with side.autocast():
                loss = model.loss(side.share(x), side.share(y))
            side.backward(loss)
            taken.append(bool(side.step(optimizer)))
            optimizer.zero_grad()
        return side.weights(model), taken

    trial.same(loop, precision="fp16", tolerance=FP16_TOLERANCE)


def saved_for_one_process(trial: Trial) -> None:
    """Save on all ranks; one process loads the file with torch alone, and trains on exactly."""
    model, optimizer = trained(trial)
    save({"model": model, "optimizer": optimizer}, trial.folder / "state.pt")
    goes_on_alone(trial, torch.load(trial.folder / "state.pt", weights_only=True))


def goes_on_alone(trial: Trial, state: dict[str, Any]) -> None:
    """Load a state in one process, and train on exactly."""
    model, optimizer = trained(trial.alone, seed=6, epochs=0)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    epoch(trial.alone, model, optimizer)
    compare(dict(model.state_dict()), fit(trial.alone, adamw, epochs=2))


def trained(side: OneProcess, seed: int = 5, epochs: int = 1) -> tuple[Any, Any]:
    """Return a model and its AdamW after some epochs."""
    model = side.wrap(small(seed=seed))
    optimizer = side.prepare(adamw(model.parameters()))
    for _ in range(epochs):
        epoch(side, model, optimizer)
    return model, optimizer


def resume_from_parts(trial: Trial) -> None:
    """Save in parts, ``io="sharded"``, load into a model and an optimizer that have trained, and train on exactly."""
    model, optimizer = trained(trial)
    save({"model": model, "optimizer": optimizer}, trial.folder / "parts", io="sharded")
    model, optimizer = trained(trial, seed=6)
    load(trial.folder / "parts", into={"model": model, "optimizer": optimizer})
    epoch(trial, model, optimizer)
    compare(trial.weights(model), fit(trial.alone, adamw, epochs=2))


def loaders_go_by_share(trial: Trial) -> None:
    """Shard a loader by the shares: ranks of one copy take the same batches, and all together take everything."""
    for shuffle in (False, True):
        rows = TensorDataset(torch.arange(8 * trial.size))
        loader = shard_loader(DataLoader(rows, batch_size=4, shuffle=shuffle), seed=1)
        own = [row for (batch,) in loader for row in batch.tolist()]
        everything = sorted(row for found in by_share(trial, own) for row in found)
        assert everything == list(range(8 * trial.size)), f"the shares have {everything}"


def by_share(trial: Trial, own: Any) -> list[Any]:
    """Return what the ranks of each share have, which must be the same on all of them."""
    found: dict[int, Any] = {}
    for share, theirs in gather_object((trial.rank, own)):
        assert found.setdefault(share, theirs) == theirs, f"ranks of share {share} have {found[share]} and {theirs}"
    return list(found.values())


def uneven_evaluation(trial: Trial) -> None:
    """Evaluate more batches on one share than on another, or refuse by name; never hang."""
    model = trial.wrap(small()).eval()
    x, _ = next(trial.alone.batches())
    with torch.no_grad():
        for _ in range(1 + trial.rank):
            compare(model(x), small()(x))


def ranks_are_in_sync(trial: Trial) -> None:
    """Prove after training that ranks which hold the same part hold the same numbers."""
    model, _ = trained(trial)
    assert_in_sync(model)
    strategy = bound_strategy(model) or trial.strategy  # the one that `choose` has taken
    held = list(strategy.held(model))
    assert held or strategy.shards, "held() names no tensors, though each rank has the whole model"


_MUST = (
    adamw_in_float64, clip_tells_the_norm, accumulate_a_short_window, scale_loss_by_count, fp16_overflow,
    saved_for_one_process, resume_from_parts, loaders_go_by_share, ranks_are_in_sync,
)  # fmt: skip
BEHAVIOURS = {
    **{body.__name__: Behaviour(body) for body in _MUST},
    uneven_evaluation.__name__: Behaviour(uneven_evaluation, may_refuse=True),
}
