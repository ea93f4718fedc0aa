"""What a strategy is: how the ranks meet, and how a model, its optimizer and its steps are prepared for this run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distwrap.group.world import World
from distwrap.model.forward_routing import ForwardMethods
from distwrap.precision import InPrecision

if TYPE_CHECKING:
    from distwrap.checkpoint.formats import CheckpointIO


@dataclass(frozen=True)
class Wrapping:
    """How a model is to be wrapped.

    Attributes:
        device: where it is.
        in_precision: how it computes.
        forward_methods: which of its methods may run a forward.
        comm: the algorithm of exchange; ``None`` for DDP's own.
        options: for the strategy, as ``find_unused_parameters`` for DDP.
    """

    device: torch.device
    in_precision: InPrecision
    forward_methods: ForwardMethods
    comm: Any
    options: dict[str, Any]


class Strategy:
    """One way to replicate a model. Subclass it, or one of ours, and override what is to be different.

    A strategy is made in the caller and travels to the ranks, so it must be picklable. ``examples/custom_strategy.py``
    has one with a group set-up, a wrapping and a file format of its own.

    Attributes:
        launches: how many processes there are: one a ``"device"``, one a ``"node"``, or ``"one"``, in which case the
            decorated function runs in the caller's process.
        backend: of the process group, where `@distributed` says ``"auto"``; ``None`` leaves it to the device.
    """

    launches: Literal["device", "node", "one"] = "device"
    backend: str | None = None

    def init_process_group(self, backend: str, **arguments: Any) -> None:
        """Make the process group, by default by ``torch.distributed.init_process_group``.

        Args:
            backend: as the run has chosen it.
            **arguments: ``store``, ``rank``, ``world_size``, ``timeout`` and ``device_id``, for torch.
        """
        dist.init_process_group(backend, **arguments)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        """Return the model that the loop trains; the one given is on its device, and in its weights' type."""
        raise NotImplementedError(f"{type(self).__name__} has no prepare_model().")

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        """Return the optimizer that the loop steps."""
        return optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, which is scaled where the precision is fp16; for `distwrap.backward`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer, for `distwrap.optimizer_step`; under fp16 torch's ``GradScaler`` does it instead."""
        optimizer.step()

    def checkpoint_io(self) -> str | CheckpointIO:
        """Return how `distwrap.save` writes where its ``io`` is ``"auto"``: a name that it takes, or an object."""
        return "auto"

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({options})"
