"""Models of one process: in its precision, on its device, or on several by torch's DataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel.parallel_apply import parallel_apply

from distwrap.model.methods import Call, ForwardMethods, RoutedModule
from distwrap.model.transparent import to_device, unwrap_model
from distwrap.precision import InPrecision


class LocalModel(RoutedModule):
    """A model of this one process, under autocast, or on an accelerator."""

    def __init__(
        self, module: nn.Module, in_precision: InPrecision, device: torch.device, forward_methods: ForwardMethods
    ) -> None:
        super().__init__()
        self.module = module
        own = self.__dict__
        own["_run"], own["_in_precision"], own["_own_device"] = in_precision(self._locally), in_precision, device
        own["_users_class"] = type(unwrap_model(module))
        self.route(forward_methods)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in its precision."""
        return self._run(*args, **kwargs)

    def _locally(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._moved((args, kwargs))
        return self.module(*args, **kwargs)

    def _moved(self, arguments: Any) -> Any:
        return to_device(arguments, self._own_device)

    def _begin(self, call: Call) -> bool:
        call.inside.enter_context(self._in_precision.context())
        return False

    def _end(self, output: Any, call: Call) -> Any:
        return self._in_precision.outputs(output) if call.begun else output


class DataParallelModel(RoutedModule, DataParallel):  # type: ignore[type-arg]
    """A `DataParallel` over several devices of this process, in its precision in each of its threads."""

    def __init__(
        self,
        module: nn.Module,
        in_precision: InPrecision,
        device_ids: Sequence[int],
        forward_methods: ForwardMethods,
    ) -> None:
        super().__init__(module, device_ids=list(device_ids))
        self.__dict__["_in_precision"] = in_precision
        self.route(forward_methods)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas; autocast is a thread's own, so each gets it anew."""
        run = [self._in_precision(replica) for replica in replicas]
        return parallel_apply(run, inputs, kwargs, self.device_ids[: len(replicas)])

    def _begin(self, call: Call) -> bool:
        call.inside.enter_context(self._in_precision.context())
        return False

    def _end(self, output: Any, call: Call) -> Any:
        return self._in_precision.outputs(output) if call.begun else output
