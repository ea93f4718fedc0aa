"""The base class of strategies: how ranks meet, and how models and optimizers are prepared and used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distwrap.comm.base import Algorithm
from distwrap.environments import Placement
from distwrap.group.world import Layout, World
from distwrap.model.forward_routing import ForwardMethods
from distwrap.model.in_sync import Held, tensors_of
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.options import Options
from distwrap.precision import InPrecision

if TYPE_CHECKING:
    from distwrap.checkpoint.formats import CheckpointIO


@dataclass(frozen=True)
class Wrapping:
    """Instructions for wrapping a model.

    Attributes:
        device: the device on which the model computes.
        in_precision: the precision in which it computes on that device.
        forward_methods: the methods that may run a forward.
        comm: the algorithm of exchange; ``None`` for DDP's own.
        options: options for the strategy, as ``find_unused_parameters`` for DDP.
    """

    device: torch.device
    in_precision: InPrecision
    forward_methods: ForwardMethods
    comm: Algorithm | None
    options: dict[str, Any]


class Strategy:
    """Way to replicate or divide a model; subclass it, or a strategy of distwrap, and override what should differ.

    A strategy is made in the caller and travels to the ranks, so it must be picklable. `wrap_model` and
    `wrap_optimizer` bind the objects that they prepare to it: `backward`, `optimizer_step`, `accumulate`, the
    comparison of weights and checkpoints then use the strategy of the model or optimizer at hand.
    ``examples/custom_strategy.py`` has one with a group set-up, a wrapping and a file format of its own.

    Attributes:
        launches: the number of processes: one for each ``"device"``, one for each ``"node"``, or ``"one"``, which runs
            the decorated function in the caller's process.
        backend: the backend of the process group if `@distributed` says ``"auto"``; ``None`` leaves the choice to the
            device.
        places_model: whether the strategy itself moves the model to its devices, as for a model that does not fit on
            one.
        owns_scale: whether `backward` and `step` scale fp16 themselves, so that distwrap's scaler is not used.
        shards: whether the full state of a model or optimizer is put together from several ranks: `state` is then a
            collective, also for a checkpoint that rank 0 writes.
        steps_parameters: whether optimizers hold the model's own parameters; otherwise they hold shards that the
            strategy has made.
        averages_at_once: whether each backward averages gradients over the ranks, also within a window of `accumulate`.
        same_weights: whether all ranks hold the same weights after each step, so that distwrap compares them.
        device: the device of its only process, if that is neither torch's accelerator nor the CPU.
        formerly: the name of another package by which it was chosen; a line at the start says what that name became.
    """

    launches: Literal["device", "node", "one"] = "device"
    backend: str | None = None
    places_model: bool = False
    owns_scale: bool = False
    shards: bool = False
    steps_parameters: bool = False
    averages_at_once: bool = False
    same_weights: bool = True
    device: torch.device | None = None
    formerly: str = ""

    # In the caller

    def check(self, run: Options) -> None:
        """Refuse a run before a process starts or a model is wrapped: missing packages, options that clash.

        Raises:
            OptionError: the run is refused; the message says what to install or change.
        """

    # When the ranks meet

    def join(self, placement: Placement, options: Options, secret: bytes) -> World | None:
        """Meet the other ranks in this strategy's own way, and return their world, which becomes the current one.

        Returns:
            ``None`` if they meet as under any other strategy.
        """
        return None

    def init_process_group(self, backend: str, **arguments: Any) -> None:
        """Make the process group, by default by ``torch.distributed.init_process_group``.

        Args:
            backend: the backend that the run has chosen.
            **arguments: ``store``, ``rank``, ``world_size``, ``timeout`` and ``device_id`` for torch.
        """
        dist.init_process_group(backend, **arguments)

    def setup(self, world: World) -> Layout | None:
        """Arrange the ranks when several have met. Every rank calls it, only for the strategy of the run.

        Returns:
            The share of the data for this rank; ``None`` if each rank takes its own.
        """
        return None

    # Models and optimizers

    def choose(self, model: nn.Module, run: Options, device: torch.device) -> Strategy:
        """Return the strategy that prepares this model: itself, unless it chooses among others.

        `wrap_model` calls it on every rank, and binds the model to the result, which must be the same on all ranks.
        """
        return self

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        """Return the model for the loop to train.

        The given model is on its device, with its weights in their type, unless the strategy `places_model` itself.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prepare_model().")

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        """Return the optimizer for the loop to step; subclasses of `DDPStrategy` must call ``super()``."""
        return optimizer

    # A step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, which is scaled under fp16; for `distwrap.backward`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Switch the exchange of gradients in the next backwards on or off; for `accumulate`."""

    def gradients(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the gradients accumulated on this rank, to rescale in place; for `scale_loss`."""
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def clip(
        self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float
    ) -> torch.Tensor | float | None:
        """Clip gradients by the norm over the whole model, whatever part of it is here; return that norm."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def norm(self, optimizer: Optimizer) -> torch.Tensor | float | None:
        """Return the norm by which the last step has clipped, if `clip` could not know it before the step."""
        return None

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether gradients overflowed under fp16 on other ranks only, so that all skip the step."""
        return False

    def step(self, optimizer: Optimizer) -> bool | None:
        """Step an optimizer, for `distwrap.optimizer_step`.

        Under fp16 the gradients are already unscaled, and a rank with an overflow does not call it. So all ranks must
        have the same gradients before the step, as under DDP; a strategy that exchanges within it `owns_scale`.

        Returns:
            ``False`` if the step was skipped.
        """
        optimizer.step()
        return True

    # State

    def consolidate(self, model: nn.Module) -> None:
        """Give every rank one set of weights, for `distwrap.consolidate`; by default they already have the same."""

    def held(self, model: nn.Module) -> Iterable[Held]:
        """Return the tensors that must be equal on all ranks with the same part, for the comparison.

        By default these are all tensors of a model that every rank has as a whole, and none of a model that a strategy
        divides, since only the strategy knows the parts.
        """
        return () if self.shards else tensors_of(model)

    def is_divided(self, thing: nn.Module | Optimizer) -> bool:
        """Return whether no single rank has the state of a model or optimizer; by default as `shards`."""
        return self.shards

    def state(self, thing: nn.Module | Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        """Return the full state of a model or optimizer, with the plain model's keys, as in one process.

        Args:
            thing: a model that this strategy has prepared, or an optimizer of its parameters, prepared or not.
            everywhere: whether every rank needs a state that is put together from several ranks, or only rank 0.
        """
        plain = unwrap_model(thing) if isinstance(thing, nn.Module) else thing
        return plain.state_dict()

    def load_state(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
        """Load a `state` of this or any other strategy; every rank calls it with all of it."""
        if isinstance(thing, nn.Module):
            thing = unwrap_model(thing)
            state = strip_module_prefix(state, target=thing)
        thing.load_state_dict(state)

    def give_back(
        self, original: nn.Module | Optimizer, prepared: nn.Module | Optimizer, state: dict[str, Any]
    ) -> None:
        """Restore the caller's own model or optimizer with a full state; for ``retrofit``."""
        original.load_state_dict(state)

    def parts(self, thing: nn.Module | Optimizer) -> dict[str, Any] | None:
        """Return the `state` with this rank's piece of each divided tensor, for a checkpoint in parts.

        Every rank calls it, and returns the same names. A tensor of which each rank has another piece is a ``DTensor``;
        torch's distributed checkpoint puts its pieces together, or rank 0 does so tensor by tensor for a single file.
        Any other tensor must be equal on all ranks, and other values are saved from rank 0. `load_state` gets whole
        tensors, at any number of ranks, unless `parts_to_load` asks for pieces.

        Returns:
            ``None`` if this rank has everything, so that `state` is used.
        """
        return None

    def parts_to_load(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return a stored state reduced to what this rank needs, so that no rank reads all of a large one.

        A tensor of which this rank needs a piece is replaced by an empty ``DTensor``, and one that it does not need by
        ``None``; other tensors are read whole. The checkpoint fills them, and passes the result to `load_state`.

        Args:
            thing: as for `state`.
            state: the saved state, from any strategy; its tensors may have no numbers yet. Its keys must stay.

        Returns:
            ``None`` if `load_state` needs whole tensors.
        """
        return None

    def checkpoint_io(self) -> str | CheckpointIO:
        """Return the format of `distwrap.save` if its ``io`` is ``"auto"``: a name or an object."""
        return "auto"

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "formerly"}
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({options})"
