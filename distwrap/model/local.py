"""Models of one process: in its precision, on its device, or on several by torch's DataParallel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel.parallel_apply import parallel_apply

from distwrap.model.forward_routing import ForwardMethods, RoutedModule
from distwrap.model.transparent import unwrap_model
from distwrap.precision import InPrecision


class LocalModel(RoutedModule):
    """A model of this one process, under autocast, or on an accelerator."""

    def __init__(
        self, module: nn.Module, in_precision: InPrecision, device: torch.device, forward_methods: ForwardMethods
    ) -> None:
        super().__init__()
        self.module = module
        own = self.__dict__
        own["_run"], own["_users_class"] = in_precision(self._locally), type(unwrap_model(module))
        self.route(forward_methods, in_precision, device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in its precision."""
        return self._run(*args, **kwargs)

    def _locally(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        return self.module(*args, **kwargs)


class DataParallelModel(RoutedModule, DataParallel):  # type: ignore[type-arg]
    """A `DataParallel` over several devices of this process, in its precision in each of its threads."""

    def __init__(
        self, module: nn.Module, in_precision: InPrecision, device_ids: Sequence[int], forward_methods: ForwardMethods
    ) -> None:
        super().__init__(module, device_ids=list(device_ids))
        self.route(forward_methods, in_precision)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas; autocast is a thread's own, so each gets it anew."""
        run = [self._in_precision(replica) for replica in replicas]
        return parallel_apply(run, inputs, kwargs, self.device_ids[: len(replicas)])
