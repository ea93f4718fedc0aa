"""Windows of micro-batches: when an optimizer may step, and what a loss is divided by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from distwrap import protocols
from distwrap._internals.torch import foreach
from distwrap.errors import ModelError, OptionError
from distwrap.group.collectives import total
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World, current_world
from distwrap.model import unwrap_model
from distwrap.model.gradients import Average
from distwrap.model.wrapped_models import bound_strategy, gradients_of, parameters_of, under_ddp
from distwrap.strategies.base import Strategy


class Window:
    """Micro-batches of one optimizer step, as `accumulate` yields it with each of them.

    Attributes:
        size: the number of micro-batches; fewer than asked for in the last window of an epoch.
        index: the number of the current micro-batch, from 0.
        last: whether the current one is the last; step the optimizer then.
    """

    def __init__(self, size: int, models: Sequence[nn.Module]) -> None:
        self.size, self.index, self.is_displaced = size, 0, False
        self._models = models
        self._counted = 0.0
        self._divisor = 0.0
        self._scaled = -1

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of this window's models."""
        return self.has_any(parameters_of(optimizer))

    def has_any(self, parameters: Iterable[int]) -> bool:
        """Return whether any of these ids are those of parameters of this window's models."""
        return not {id(own) for model in self._models for own in model.parameters()}.isdisjoint(parameters)

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the gradients of a model accumulate in this window."""
        return any(own is model for own in self._models)

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
        """Scale a loss by the count of the whole window on all ranks, which only the last micro-batch knows.

        Earlier micro-batches use an estimate; the last one rescales the gradients to the true count.
        """
        if self._scaled == self.index:
            raise ModelError(
                "scale_loss() was called twice for one micro-batch of accumulate(): add the sums of the losses first."
            )
        self._scaled = self.index
        self._counted += count
        if not self.last:
            if not self._divisor:
                at_once = any(strategy.averages_at_once for strategy in self._strategies())
                shares = total(max(count, 1.0)) if at_once else max(count, 1.0) * world_size
                self._divisor = shares * self.size  # gradients averaged at once need one divisor on all ranks
            return loss_sum * (world_size / self._divisor)
        everything = total(self._counted)
        if not everything:
            return loss_sum * 0.0
        if self._divisor:
            self._rescale(self._divisor / everything)
        return loss_sum * (world_size / everything)

    def _rescale(self, factor: float) -> None:
        pairs = zip(self._models, self._strategies(), strict=True)
        gradients = [gradient for model, strategy in pairs for gradient in strategy.gradients(model)]
        if gradients:
            with torch.no_grad():
                foreach("mul_", gradients, factor)

    def _strategies(self) -> list[protocols.Strategy]:
        return [bound_strategy(model) or Strategy() for model in self._models]


class Windows(RunPart):
    """Accumulation windows of one run.

    Attributes:
        under_way: the current window of each running `accumulate`.
        left_out: the models of each running `no_sync`.
    """

    def __init__(self, world: World) -> None:
        self.under_way: dict[object, Window] = {}
        self.left_out: dict[object, list[nn.Module]] = {}
        self._have_left_out: WeakSet[nn.Module] = WeakSet()
        self._world = world
        world.part(OptimizerSteps).listen(Phase.REFUSE, lambda optimizer, *_: self.refuse_half(optimizer))

    def only(self) -> Window | None:
        """Return the window that is under way; ``None`` without one.

        Raises:
            ModelError: there are several.
        """
        if len(self.under_way) > 1:
            raise ModelError(
                f"scale_loss(): {len(self.under_way)} loops of accumulate() are running. Say to which one the "
                "micro-batch belongs: scale_loss(loss, count, window=window)."
            )
        return next(iter(self.under_way.values()), None)

    def begin(self, place: object, window: Window) -> None:
        """Note the window of a micro-batch; windows of the same model from loops that were left are over.

        Raises:
            ModelError: such a loop continues.
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

    def leave_out(self, place: object, models: list[nn.Module]) -> None:
        """Note models whose gradients are not exchanged.

        Raises:
            ModelError: `accumulate` is running with one of them.
        """
        if any(window.is_of(model) for window in self.under_way.values() for model in models):
            raise ModelError(
                "no_sync() in a loop of accumulate() with the same model: accumulate() itself leaves out the "
                "exchange in all but the last micro-batch of a window. Leave no_sync() out, or loop over the "
                "loader alone."
            )
        self.left_out[place] = models
        self._have_left_out.update(models)

    def is_left_out(self, model: nn.Module) -> bool:
        """Return whether a `no_sync` currently leaves out the exchange of a model's gradients."""
        return any(own is model for models in self.left_out.values() for own in models)

    def refuse_half(self, optimizer: Optimizer) -> None:
        """Refuse a step in the middle of a model's window, or over gradients that `no_sync` left unaveraged.

        Raises:
            ModelError: it is one of these; the message says when to step.
        """
        for window in self.under_way.values():
            if not window.last and window.concerns(optimizer):
                raise ModelError(
                    f"optimizer step after micro-batch {window.index + 1} of {window.size} in accumulate(): "
                    "the gradients are averaged over the ranks only at the last one. Step where window.last is "
                    "true; if the loop was left early, call close() on the iterator."
                )
        if self._have_left_out:
            self._refuse_left_out(optimizer)

    def _refuse_left_out(self, optimizer: Optimizer) -> None:
        held = parameters_of(optimizer)
        for model in self._have_left_out:
            watch = gradients_of(model)
            alone = getattr(
                under_ddp(model), "trains_alone", False
            )  # as under local_sgd, where nobody averages gradients
            is_behind = not alone and watch is not None and watch.average is Average.LEFT_OUT
            if (is_behind or self.is_left_out(model)) and Window(1, [model]).has_any(held):
                raise ModelError(
                    f"optimizer step of {type(unwrap_model(model)).__name__} "
                    f"{'after a backward in' if is_behind else 'inside'} no_sync(): its gradients are not "
                    "averaged over the ranks until a forward and backward outside of no_sync(). Leave "
                    "no_sync() out for the batch before each step, also for the last batch of an epoch."
                )


def scale_loss(loss_sum: torch.Tensor, count: float | torch.Tensor, *, window: Window | None = None) -> torch.Tensor:
    """Turn a sum over tokens or samples into the loss whose gradient is that of the mean over those of all ranks.

    Each rank, and each micro-batch of an `accumulate` window, counts by the number of items that it holds; a mean of
    means would give the tokens of a short batch more weight. As DDP averages over the ranks, the result is loss_sum ·
    world size / total count. Each step costs one small all-reduce. Gradients must be zero when a window begins.

    Args:
        loss_sum: the sum of this micro-batch's losses, a scalar.
        count: the number of tokens or samples in it; 0 if there are none.
        window: the window to which the micro-batch belongs, where several loops of `accumulate` are running.

    Returns:
        The loss to call ``backward`` on. It is not this rank's mean: for a log, divide `loss_sum` by `count`.

    Raises:
        ModelError: it is called twice for one micro-batch of `accumulate`; or several such loops are running, and no
            `window` is given.
        OptionError: the loss is not a scalar, or the count is negative.

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
    window = window or world.part(Windows).only()
    world_size = world.layout.size
    if window is not None:
        return window.scaled(loss_sum, number, world_size)
    everything = total(number)
    return loss_sum * (world_size / everything if everything else 0.0)
