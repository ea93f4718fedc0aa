"""Gradient accumulation: several micro-batches a step, one exchange of gradients, the right divisor.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (``no_sync``)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from distwrap._internals.torch import foreach
from distwrap.checks import is_whole
from distwrap.data.lockstep import Lockstep
from distwrap.data.loops import batches_left, lockstep_of
from distwrap.data.position import fetching_ahead, move
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
        self.size, self.index, self.is_displaced = size, 0, False
        self._models = models
        self._counted = 0.0
        self._divisor = 0.0
        self._scaled = -1

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps over the gradients of this window's models."""
        return self.has_any(parameters_of(optimizer))

    def has_any(self, parameters: Iterable[int]) -> bool:
        """Return whether parameters of this window's models are among some, which are told by their id."""
        return not {id(own) for model in self._models for own in model.parameters()}.isdisjoint(parameters)

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
        if gradients:
            with torch.no_grad():
                foreach("mul_", gradients, factor)


class Windows(RunPart):
    """The accumulation windows of one run.

    Attributes:
        under_way: the window of each `accumulate` that is under way.
    """

    def __init__(self, world: World) -> None:
        self.under_way: dict[object, Window] = {}
        self._handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self.refuse_half(optimizer))

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def of_loss(self, loss: torch.Tensor) -> Window | None:
        """Return the window of the models that a loss was computed with; ``None`` where none is under way.

        Raises:
            ModelError: it is of none of several windows, or of more than one.
        """
        if len(self.under_way) < 2:
            return next(iter(self.under_way.values()), None)
        reached = _parameters_under(loss)
        found = [window for window in self.under_way.values() if window.has_any(reached)]
        if len(found) != 1:
            raise ModelError(
                f"scale_loss(): {len(self.under_way)} loops of accumulate() are under way, and the loss was computed "
                f"with the models of {len(found)} of them. Say whose micro-batch it is: scale_loss(loss, count, "
                f"window=window)."
            )
        return found[0]

    def begin(self, place: object, window: Window) -> None:
        """Note a micro-batch's window; those of loops that were left before their end, and never closed, are over.

        Raises:
            ModelError: such a loop goes on.
        """
        if window.is_displaced:
            raise ModelError(
                f"accumulate(): before micro-batch {window.index + 1} of {window.size} another accumulate() with the "
                f"same model has begun, so the gradients of both are mixed. End one loop before the next, or go "
                f"through both loaders in one: accumulate(zip(loader, other), steps, model)."
            )
        self.under_way.pop(place, None)
        for other, left in list(self.under_way.items()):
            if left.shares_model(window):
                left.is_displaced = True
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
                    f"optimizer step after micro-batch {window.index + 1} of {window.size} in accumulate(): the "
                    f"gradients are this rank's own until the last. Step where window.last is true; if the loop was "
                    f"left, call close() on what is held of it."
                )


def accumulate(
    loader: Iterable[Batch], steps: int, model: nn.Module | Sequence[nn.Module]
) -> Iterator[tuple[Batch, Window]]:
    """Iterate over micro-batches in windows of `steps`, after each of which the optimizer steps.

    Forward and backward of all but the last micro-batch of a window leave the gradients on their rank; the last one
    averages what has accumulated. The size of a short last window is known from its beginning: from the loader's
    length, or, where it has none, and with `lockstep`, by taking a window's batches ahead. In the midst of a window a
    sharded loader's position is the window's start, since what has accumulated is in no checkpoint.

    Args:
        loader: any iterable; the same number of micro-batches on every rank, or `lockstep` of any.
        steps: micro-batches a window.
        model: what `wrap_model` returned, or several such.

    Yields:
        Each micro-batch, with its `Window`. Divide a mean loss by ``window.size``, or use `scale_loss` for sums.

    Raises:
        OptionError: `steps` is no positive whole number.
        LoaderError: the loader gave fewer batches than its length says.
        ModelError: an optimizer of the model steps within a window, or another loop with the model begins in one that
            goes on.

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
    return Accumulation(loader, steps, models)


class Accumulation(Iterator[tuple[Batch, Window]]):
    """Iterator over micro-batches in windows, which a loop may leave, and another one go on with."""

    def __init__(self, loader: Iterable[Batch], steps: int, models: list[nn.Module]) -> None:
        self._loader, self._steps, self._loop = loader, steps, _Loop(models)
        self._micro_batches = self._loop.run(loader, steps)

    def __next__(self) -> tuple[Batch, Window]:
        return next(self._micro_batches)

    def __iter__(self) -> Iterator[tuple[Batch, Window]]:
        ends = sys.is_finalizing  # at the interpreter's end no global is there any more
        try:
            while (item := next(self._micro_batches, None)) is not None:
                yield item
        finally:  # the loop was left, though somebody may hold this iterator
            if not ends():
                self._loop.release()

    def close(self) -> None:
        """Leave the loop."""
        self._micro_batches.close()

    def in_windows(
        self, lockstep: Lockstep[Any], skip: Callable[[tuple[Batch, Window]], bool] | None
    ) -> Iterator[tuple[Batch, Window]]:
        """Iterate in step with the other ranks, as ``accumulate(lockstep(loader))`` does."""
        models, steps = self._loop.models, self._steps
        by_batch = None if skip is None else lambda batch: skip((batch, Window(steps, models)))
        return _Loop(models).run(lockstep.steps(self._loader, by_batch), steps, lockstep)


class _Loop:
    """Loop over windows.

    Attributes:
        models: those whose gradients accumulate.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models
        self._windows: Windows | None = None

    def run(
        self, loader: Iterable[Batch], steps: int, lockstep: Lockstep[Any] | None = None
    ) -> Generator[tuple[Batch, Window], None, None]:
        """Yield micro-batches and their windows."""
        windows = self._windows = current_world().part(Windows)
        moves: list[Callable[[], None]] = []  # of positions; a window that was not stepped over is gone through again
        ends = sys.is_finalizing
        batches = _in_windows(loader, steps, lockstep)
        window, given = Window(0, ()), 0
        try:
            while True:
                with fetching_ahead() as ahead:
                    found = next(batches, None)
                moves += ahead
                lockstep = lockstep_of(loader) if lockstep is None else lockstep
                if found is None:
                    if lockstep is None or lockstep.preempted is None:
                        move(*moves)
                    return
                size, index, batch = found
                if index == 0:
                    window = Window(size, self.models)
                elif lockstep is not None and lockstep.is_left():
                    return
                window.index, given = index, given + 1
                windows.begin(self, window)
                if window.last:
                    move(*moves)
                    moves.clear()
                for model in self.models:
                    # Of a static graph torch sees two steps before exchanges can be left out; a mean is its own mean.
                    is_static = given <= 2 and getattr(under_ddp(model), "static_graph", False)
                    _sync_gradients(model, window.last or is_static)
                yield batch, window
        finally:
            if not ends():
                self.release()

    def release(self) -> None:
        """Exchange gradients again, unless another loop has the models by now."""
        if self._windows is not None and self._windows.under_way.pop(self, None) is not None:
            for model in self.models:
                _sync_gradients(model, True)


def _in_windows(
    loader: Iterable[Batch], steps: int, lockstep: Lockstep[Any] | None
) -> Iterator[tuple[int, int, Batch]]:
    """Yield the size of a window, a place in it, and the batch there."""
    left = batches_left(loader) or 0 if lockstep is None else 0
    batches = iter(loader)
    while left > 0:
        size = min(steps, left)
        for index in range(size):
            try:
                batch = next(batches)
            except StopIteration:
                raise LoaderError(
                    f"accumulate(): the loader has ended after {index} of the {size} micro-batches that its length "
                    f"promised for this window, so the gradients were divided by too much and not averaged. Give it "
                    f"the right __len__, or none: accumulate(iter(loader), ...)."
                ) from None
            yield size, index, batch
        left -= size
    while ahead := list(islice(batches, steps)):  # what has no length; and a loader is gone through to its end
        lockstep = lockstep_of(loader) if lockstep is None else lockstep
        if lockstep is not None:
            lockstep.step -= len(ahead)  # which the loop begins now
            if lockstep.preempted is not None:
                return
        for index, batch in enumerate(ahead):
            if lockstep is not None:
                lockstep.step += 1
            yield len(ahead), index, batch


def scale_loss(loss_sum: torch.Tensor, count: float | torch.Tensor, *, window: Window | None = None) -> torch.Tensor:
    """Turn a sum over tokens or samples into the loss whose gradient is that of the mean over all of them.

    All ranks, and all micro-batches of an `accumulate` window, count by what they hold: a mean of means would weigh the
    tokens of a short batch more. DDP averages over ranks, so the result is loss_sum · world size / total count. Each
    step costs one small all-reduce; gradients must be zero before a window begins.

    Args:
        loss_sum: this micro-batch's losses, summed; a scalar.
        count: over how many tokens or samples; 0 where it has none.
        window: whose micro-batch this is; by default that of the model with which the loss was computed.

    Returns:
        What to call ``backward`` on. It is no mean of this rank's; for a log divide `loss_sum` by `count`.

    Raises:
        ModelError: called twice for one micro-batch of `accumulate`; or several of its loops are under way, and whose
            micro-batch it is cannot be seen.
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
    window = window or world.part(Windows).of_loss(loss_sum)
    world_size = world.layout.size
    if window is not None:
        return window.scaled(loss_sum, number, world_size)
    everything = total(number)
    return loss_sum * (world_size / everything if everything else 0.0)


def _parameters_under(loss: torch.Tensor) -> set[int]:
    """Return the ids of the parameters with which a loss was computed, from its graph."""
    found, seen, nodes = set(), set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            nodes += [before for before, _ in node.next_functions]
    return found


def _sync_gradients(model: nn.Module, on: bool) -> None:
    """Let the strategy of a model exchange gradients, or torch's own DDP, where the user has wrapped with that."""
    strategy = bound_strategy(model)
    if strategy is not None:
        strategy.sync_gradients(model, on)
    elif (ddp := under_ddp(model)) is not None:
        ddp.require_backward_grad_sync = on
