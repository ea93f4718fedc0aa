"""Gradient accumulation: several micro-batches a step, with one exchange of gradients.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (``no_sync``)
"""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from torch import nn

from distwrap.checks import is_whole
from distwrap.data.lockstep import Lockstep
from distwrap.data.loops import batches_left, lockstep_of
from distwrap.data.position import fetching_ahead, move
from distwrap.errors import LoaderError, OptionError
from distwrap.group.world import current_world
from distwrap.model.wrapped_models import bound_strategy, under_ddp
from distwrap.strategies.windows import Window, Windows

Batch = TypeVar("Batch")


def accumulate(
    loader: Iterable[Batch], steps: int, model: nn.Module | Sequence[nn.Module]
) -> Iterator[tuple[Batch, Window]]:
    """Iterate over micro-batches in windows of `steps`, after each of which the optimizer steps.

    In all but the last micro-batch of a window, forward and backward leave the gradients on their rank; the last one
    averages everything that has accumulated. The size of a short last window is known from its beginning: from the
    loader's length, or, if it has none and with `lockstep`, by fetching the batches of a window ahead. In the middle of
    a window the position of a sharded loader is the window's start, since accumulated gradients are not saved in a
    checkpoint.

    Args:
        loader: any iterable with the same number of micro-batches on every rank, or `lockstep` of any iterable.
        steps: the number of micro-batches in a window.
        model: the model that `wrap_model` returned, or several of them.

    Yields:
        Each micro-batch with its `Window`. Divide a mean loss by ``window.size``, or use `scale_loss` for a sum.

    Raises:
        OptionError: `steps` is not a positive whole number.
        LoaderError: the loader gave fewer batches than its length says.
        ModelError: an optimizer of the model steps within a window, or another loop with the model begins within one.

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
    return Accumulation(loader, steps, _models(model, "accumulate"))


@contextmanager
def no_sync(model: nn.Module | Sequence[nn.Module], *, enabled: bool = True) -> Iterator[None]:
    """Leave gradients on their rank within a ``with``, for loops that accumulate by ``if step % k``.

    The next forward and backward outside of it average everything that has accumulated. Forward and backward must both
    be inside, and all ranks must take the same branch; `accumulate` takes care of both by itself. In a single process
    there is no exchange to leave out, and only an optimizer step inside is refused.

    Args:
        model: the model that `wrap_model` returned, or several of them.
        enabled: whether to leave the exchange out, for a condition in one line.

    Raises:
        ModelError: an optimizer of the model steps inside, or later over gradients that no backward has averaged; or
            the loop is one of `accumulate`.
        OptionError: `model` is not a model.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [torch.ones(1, 1)] * 4
        >>> for step, x in enumerate(loader, 1):
        ...     steps_now = step % 2 == 0 or step == len(loader)
        ...     with no_sync(model, enabled=not steps_now):
        ...         (model(x).mean() / 2).backward()
        ...     if steps_now:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    models = _models(model, "no_sync")
    if not enabled:
        yield
        return
    world, place = current_world(), object()
    windows = world.part(Windows)
    windows.leave_out(place, models)
    try:
        for item in models:
            ddp = under_ddp(item)
            # As in accumulate(), torch must see two steps of a static graph before exchanges can be left out.
            if getattr(ddp, "static_graph", False) and world.count(f"no_sync of {id(ddp)}") <= 2:
                continue
            _sync_gradients(item, False)
        yield
    finally:
        del windows.left_out[place]
        for item in models:
            _sync_gradients(item, not windows.is_left_out(item))


def _models(model: nn.Module | Sequence[nn.Module], what: str) -> list[nn.Module]:
    models = [model] if isinstance(model, nn.Module) else list(model)
    for item in models:
        if not isinstance(item, nn.Module):
            raise OptionError(f"{what}() takes the model that wrap_model() returned, not a {type(item).__name__}.")
    return models


class Accumulation(Iterator[tuple[Batch, Window]]):
    """Iterator over micro-batches in windows; one loop may leave it, and another continue it, if not in lockstep."""

    def __init__(self, loader: Iterable[Batch], steps: int, models: list[nn.Module]) -> None:
        self._loader, self._steps, self._loop = loader, steps, _Loop(models)
        self._micro_batches = self._loop.run(loader, steps)

    def __next__(self) -> tuple[Batch, Window]:
        return next(self._micro_batches)

    def __iter__(self) -> Iterator[tuple[Batch, Window]]:
        ends = sys.is_finalizing  # globals are gone when the interpreter ends
        try:
            while (item := next(self._micro_batches, None)) is not None:
                yield item
        finally:  # the loop was left, but the iterator may still be referenced
            if not ends():
                self._loop.release()
                if self._loop.is_in_step:  # the other ranks are told now, in the order of the user's loops
                    self.close()

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
        models: the models whose gradients accumulate.
        is_in_step: whether all ranks take its steps together.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self.models, self.is_in_step = models, False
        self._windows: Windows | None = None

    def run(
        self, loader: Iterable[Batch], steps: int, lockstep: Lockstep[Any] | None = None
    ) -> Generator[tuple[Batch, Window], None, None]:
        """Yield micro-batches and their windows."""
        windows = self._windows = current_world().part(Windows)
        moves: list[Callable[[], None]] = []  # of positions; a window without a step is repeated
        ends = sys.is_finalizing
        batches = _in_windows(loader, steps, lockstep)
        window, given = Window(0, ()), 0
        try:
            while True:
                with fetching_ahead() as ahead:
                    found = next(batches, None)
                moves += ahead
                lockstep = lockstep_of(loader) if lockstep is None else lockstep
                self.is_in_step = lockstep is not None
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
                    # torch must see two steps of a static graph before exchanges can be left out; averaging a mean
                    # again keeps it.
                    is_static = given <= 2 and getattr(under_ddp(model), "static_graph", False)
                    _sync_gradients(model, window.last or is_static)
                yield batch, window
        finally:
            if not ends():
                self.release()
                batches.close()  # at once, also while another thread looks at this frame and keeps what it holds

    def release(self) -> None:
        """Exchange gradients again, unless another loop uses the models now."""
        if self._windows is not None and self._windows.under_way.pop(self, None) is not None:
            for model in self.models:
                _sync_gradients(model, True)


def _in_windows(
    loader: Iterable[Batch], steps: int, lockstep: Lockstep[Any] | None
) -> Generator[tuple[int, int, Batch], None, None]:
    """Yield the size of a window, an index in it, and the batch at this index."""
    left = batches_left(loader) or 0 if lockstep is None else 0
    batches = iter(loader)
    try:
        yield from _windows(loader, batches, steps, left, lockstep)
    finally:
        if isinstance(batches, Generator) and lockstep_of(loader) is not None:
            batches.close()


def _windows(
    loader: Iterable[Batch], batches: Iterator[Batch], steps: int, left: int, lockstep: Lockstep[Any] | None
) -> Iterator[tuple[int, int, Batch]]:
    while left > 0:
        size = min(steps, left)
        for index in range(size):
            try:
                batch = next(batches)
            except StopIteration:
                raise LoaderError(
                    f"accumulate(): the loader has ended after {index} of the {size} micro-batches that its "
                    "length promised for this window, so the gradients were divided by too large a number, and "
                    "not averaged. Give the loader the right __len__, or hide it: accumulate(iter(loader), ...)."
                ) from None
            yield size, index, batch
        left -= size
    while ahead := list(islice(batches, steps)):  # without a length; also runs a loader to its end
        lockstep = lockstep_of(loader) if lockstep is None else lockstep
        if lockstep is not None:
            lockstep.step -= len(ahead)  # the loop begins these batches now
            if lockstep.preempted is not None:
                return
        for index, batch in enumerate(ahead):
            if lockstep is not None:
                lockstep.step += 1
            yield len(ahead), index, batch


def _sync_gradients(model: nn.Module, on: bool) -> None:
    """Switch the exchange of gradients of a model's strategy, or of torch's own DDP."""
    strategy = bound_strategy(model)
    if strategy is not None:
        strategy.sync_gradients(model, on)
    elif (ddp := under_ddp(model)) is not None:
        ddp.require_backward_grad_sync = on
