"""The classes that `wrap_model` puts around a model. What is decided is decided once, when wrapping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parallel.parallel_apply import parallel_apply
from torch.utils._pytree import tree_map

from distwrap.model.transparent import TransparentModule

Forward = Callable[..., Any]
InPrecision = Callable[[Forward], Forward]


class DistributedModel(TransparentModule, DistributedDataParallel):
    """A `DistributedDataParallel` that answers like the user's model.

    Without gradients the bare model runs: nothing is exchanged, so evaluation needs no lock-step.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with gradients on, through DDP."""
        if torch.is_grad_enabled():
            return DistributedDataParallel.forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        return self._modules["module"](*args, **kwargs)  # type: ignore[misc]

    def release(self) -> None:
        """Let go of the process group: from now on this is the bare model."""
        for name in ("reducer", "logger", "process_group"):
            self.__dict__.pop(name, None)
        self.__class__ = ReleasedModel  # type: ignore[assignment]


class ReleasedModel(TransparentModule):
    """What a `DistributedModel` is after its process group is gone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the bare model, in its precision."""
        run: Forward = self.__dict__.get("_without_grad", self.module)
        return run(*args, **kwargs)


class DistributedModelInPrecision(DistributedModel):
    """The same under autocast, or on an accelerator, to which it moves its inputs without gradients too."""

    def __init__(self, module: nn.Module, in_precision: InPrecision, device: torch.device, **ddp_kwargs: Any) -> None:
        super().__init__(module, **ddp_kwargs)
        object.__setattr__(self, "_with_grad", in_precision(self._through_ddp))
        object.__setattr__(self, "_without_grad", in_precision(self._locally))
        object.__setattr__(self, "_own_device", device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in its precision."""
        run: Forward = self._with_grad if torch.is_grad_enabled() else self._without_grad
        return run(*args, **kwargs)

    def _through_ddp(self, *args: Any, **kwargs: Any) -> Any:
        return DistributedDataParallel.forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _locally(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), self._own_device)
        return self.module(*args, **kwargs)


class DataParallelModel(TransparentModule, DataParallel):  # type: ignore[type-arg]
    """A `DataParallel` over several devices of this process, under autocast in each of its threads."""

    def __init__(self, module: nn.Module, in_precision: InPrecision, device_ids: Sequence[int]) -> None:
        super().__init__(module, device_ids=list(device_ids))
        object.__setattr__(self, "_in_precision", in_precision)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas; autocast is a thread's own, so each gets it anew."""
        run = [self._in_precision(replica) for replica in replicas]
        return parallel_apply(run, inputs, kwargs, self.device_ids[: len(replicas)])


class LocalModel(TransparentModule):
    """A model of this one process, under autocast, or on an accelerator."""

    def __init__(self, module: nn.Module, in_precision: InPrecision, device: torch.device) -> None:
        super().__init__()
        self.module = module
        object.__setattr__(self, "_run", in_precision(self._locally))
        object.__setattr__(self, "_own_device", device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in its precision."""
        return self._run(*args, **kwargs)

    def _locally(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), self._own_device)
        return self.module(*args, **kwargs)


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in any nesting to a device; costs nothing on the CPU."""
    if device.type == "cpu":
        return value
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, value)
