"""Gradient accumulation: several micro-batches a step, one exchange of gradients, the right divisor.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (``no_sync``)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap._internals.torch import foreach
from distwrap.checks import is_whole
from distwrap.data.sharded import batches_left
from distwrap.errors import LoaderError, ModelError, OptionError
from distwrap.group.collectives import total
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.wrapped_models import bound_strategy, parameters_of, under_ddp
from distwrap.strategies.base import Strategy

Batch = TypeVar("Batch")


class Window:
    """The micro-batches of one optimizer step.

    Attributes:
        size: how many they are: fewer than asked for in the last window of an epoch.
        index: which of them is at hand, from 0.
        last: whether it is the last one: step the optimizer then.
    """

    def __init__(self, size: int, models: Sequence[nn.Module]) -> None:
        self.size, self.index = size, 0
        self._models = models
        self._counted = 0.0
        self._divisor = 0.0
        self._scaled = -1

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps over the gradients of this window's models."""
        held = {id(parameter) for model in self._models for parameter in model.parameters()}
        return not held.isdisjoint(parameters_of(optimizer))

    def shares_model(self, other: Window) -> bool:
        """Return whether two windows have a model in common."""
        return not set(map(id, self._models)).isdisjoint(map(id, other._models))

    @property
    def last(self) -> bool:
        """Whether this is the last micro-batch of the window."""
        return self.index == self.size - 1

    def __repr__(self) -> str:
        return f"Window(size={self.size}, index={self.index})"

    def scaled(self, loss_sum: torch.Tensor, count: float, world_size: int) -> torch.Tensor:
        """Divide by the count of the whole window on all ranks, though it is known with the last micro-batch only.

        Earlier micro-batches are divided by an estimate; the last one rescales the gradients to the true count.
        """
        if self._scaled == self.index:
            raise ModelError(
                "scale_loss() was called twice for one micro-batch of accumulate(): add the sums of the losses first."
            )
        self._scaled = self.index
        self._counted += count
        if not self.last:
            self._divisor = self._divisor or max(count, 1.0) * self.size * world_size
            return loss_sum * (world_size / self._divisor)
        everything = total(self._counted)
        if not everything:
            return loss_sum * 0.0
        if self._divisor:
            self._rescale(self._divisor / everything)
        return loss_sum * (world_size / everything)

    def _rescale(self, factor: float) -> None:
        gradients = [grad for model in self._models for grad in (bound_strategy(model) or Strategy()).gradients(model)]
        with torch.no_grad():
            foreach("mul_", gradients, factor)


class Windows(RunPart):
    """The accumulation windows of one run.

    Attributes:
        under_way: the window of each `accumulate` that is under way, the one that began last at the end.
    """

    def __init__(self, world: World) -> None:
        self.under_way: dict[object, Window] = {}

    @property
    def current(self) -> Window | None:
        """The window that began last, or ``None``."""
        return next(reversed(self.under_way.values()), None)

    def begin(self, place: object, window: Window) -> None:
        """Note a window that begins; those of loops that were left before their end, and never closed, are over."""
        for other, left in list(self.under_way.items()):
            if other is place or left.shares_model(window):
                del self.under_way[other]
        self.under_way[place] = window

    def refuse_half(self, optimizer: Optimizer) -> None:
        """Refuse to step over gradients in the middle of the window of a model.

        Raises:
            ModelError: says when to step.
        """
        for window in self.under_way.values():
            if not window.last and window.concerns(optimizer):
                raise ModelError(
                    f"optimizer_step() after micro-batch {window.index + 1} of {window.size} in accumulate(): the "
                    f"gradients are this rank's own until the last. Step where window.last is true."
                )


def accumulate(
    loader: Iterable[Batch], steps: int, model: nn.Module | Sequence[nn.Module]
) -> Iterator[tuple[Batch, Window]]:
    """Iterate over micro-batches in windows of `steps`, after each of which the optimizer steps.

    Forward and backward of all but the last micro-batch of a window leave the gradients on their rank; the last one
    averages what has accumulated. The size of a short last window is known from its beginning: from the loader's
    length, or, where it has none, by taking a window's batches ahead.

    Args:
        loader: any iterable; the same number of micro-batches on every rank.
        steps: micro-batches a window.
        model: what `wrap_model` returned, or several such.

    Yields:
        Each micro-batch, with its `Window`. Divide a mean loss by ``window.size``, or use `scale_loss` for sums.

    Raises:
        OptionError: `steps` is no positive whole number.
        LoaderError: the loader gave fewer batches than its length says.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for x, window in accumulate([torch.ones(1, 1)] * 5, 2, model):
        ...     (model(x).mean() / window.size).backward()
        ...     if window.last:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         print(window.size)
        2
        2
        1
    """
    if not is_whole(steps, 1):
        raise OptionError(f"accumulate(steps={steps!r}): it must be a whole number from 1.")
    models = [model] if isinstance(model, nn.Module) else list(model)
    for item in models:
        if not isinstance(item, nn.Module):
            raise OptionError(f"accumulate() takes the model that wrap_model() returned, not a {type(item).__name__}.")
    return _accumulate(loader, steps, models)


def _accumulate(loader: Iterable[Batch], steps: int, models: list[nn.Module]) -> Iterator[tuple[Batch, Window]]:
    windows, place = current_world().part(Windows), object()
    ends = sys.is_finalizing  # at the interpreter's end no global is there any more
    try:
        for size, batches in _windows(loader, steps):
            window = Window(size, models)
            windows.begin(place, window)
            for index, batch in enumerate(batches):
                window.index = index
                for model in models:
                    _sync_gradients(model, window.last)
                yield batch, window
    finally:
        windows.under_way.pop(place, None)
        for model in models if not ends() else ():
            _sync_gradients(model, True)


def _windows(loader: Iterable[Batch], steps: int) -> Iterator[tuple[int, Iterable[Batch]]]:
    """Yield the size of each window, and its batches."""
    left = batches_left(loader) or 0
    batches = iter(loader)
    while left > 0:
        size = min(steps, left)
        yield size, _exactly(size, batches)
        left -= size
    while ahead := list(islice(batches, steps)):  # what has no length; and a loader is gone through to its end
        yield len(ahead), ahead


def _exactly(size: int, batches: Iterator[Batch]) -> Iterator[Batch]:
    for number in range(size):
        try:
            batch = next(batches)
        except StopIteration:
            raise LoaderError(
                f"accumulate(): the loader has ended after {number} of the {size} micro-batches that its length "
                f"promised for this window, so the gradients were divided by too much and not averaged. Give it the "
                f"right __len__, or none: accumulate(iter(loader), ...)."
            ) from None
        yield batch


def scale_loss(loss_sum: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
    """Turn a sum over tokens or samples into the loss whose gradient is that of the mean over all of them.

    All ranks, and all micro-batches of an `accumulate` window, count by what they hold: a mean of means would weigh the
    tokens of a short batch more. DDP averages over ranks, so the result is loss_sum · world size / total count. Each
    step costs one small all-reduce; gradients must be zero before a window begins.

    Args:
        loss_sum: this micro-batch's losses, summed; a scalar.
        count: over how many tokens or samples; 0 where it has none.

    Returns:
        What to call ``backward`` on. It is no mean of this rank's; for a log divide `loss_sum` by `count`.

    Raises:
        ModelError: called twice for one micro-batch of `accumulate`.
        OptionError: the loss is no scalar, or the count is negative.

    Example:
        >>> scale_loss(torch.tensor(6.0), 3)
        tensor(2.)
    """
    number = float(count)
    if loss_sum.dim() != 0:
        raise OptionError(
            f"scale_loss() takes the sum of the losses, a scalar, not a tensor of {tuple(loss_sum.shape)}."
        )
    if not number >= 0:
        raise OptionError(f"scale_loss(count={number:g}): it must be 0 or more.")
    world = current_world()
    window = world.part(Windows).current
    world_size = world.layout.size
    if window is not None:
        return window.scaled(loss_sum, number, world_size)
    everything = total(number)
    return loss_sum * (world_size / everything if everything else 0.0)


def _sync_gradients(model: nn.Module, on: bool) -> None:
    """Let the strategy of a model exchange gradients, or torch's own DDP, where the user has wrapped with that."""
    strategy = bound_strategy(model)
    if strategy is not None:
        strategy.sync_gradients(model, on)
    elif (ddp := under_ddp(model)) is not None:
        ddp.require_backward_grad_sync = on
