"""A strategy of another package that is not DDP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap import Strategy, broadcast, rank, reduce, world_size
from distwrap.errors import OptionError
from distwrap.strategies import TransparentModule, World, Wrapping


class Copy(TransparentModule):
    """The user's model, which computes in its precision."""

    def __init__(self, module: nn.Module, wrapping: Wrapping) -> None:
        super().__init__()
        self.module = module
        self._in_precision = wrapping.in_precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_precision(self.module)(*args, **kwargs)


class Owners(Strategy):
    """Each parameter is stepped on one rank, which alone holds the optimizer's state of it."""

    shards = True  # so that a checkpoint asks every rank
    exchanges = "each rank sends the others what it has stepped"  # so that comm= is refused

    def check(self, run: Any) -> None:
        super().check(run)
        if run.precision == "fp16":
            raise OptionError("strategy='owners' has no precision='fp16': a step would be skipped on some ranks alone.")

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        self.refuse_options(wrapping)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.copy_(broadcast(tensor.data))
        return Copy(model, wrapping)

    def prepare_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> Optimizer:
        optimizer.register_step_pre_hook(lambda *_: self._before(optimizer))
        optimizer.register_step_post_hook(lambda *_: self._after(optimizer))
        return optimizer

    def clip(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor], max_norm: float) -> Any:
        self._average(optimizer)  # once more before the step, where it changes nothing: all ranks have the mean
        return super().clip(optimizer, parameters, max_norm)

    def holders(self, thing: nn.Module | Optimizer) -> dict[int, list[int]] | None:
        if not isinstance(thing, Optimizer):
            return None  # every rank has the whole model
        return {id(parameter): [owner] for parameter, owner in self._owners(thing)}

    def _owners(self, optimizer: Optimizer) -> list[tuple[nn.Parameter, int]]:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [(parameter, index % world_size()) for index, parameter in enumerate(held)]

    def _average(self, optimizer: Optimizer) -> None:
        for parameter, _ in self._owners(optimizer):
            # A parameter that this rank has not used takes part too: the others wait for it.
            parameter.grad = reduce(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)

    def _before(self, optimizer: Optimizer) -> None:
        self._average(optimizer)
        for parameter, owner in self._owners(optimizer):
            if owner != rank():
                parameter.grad = None  # the optimizer then leaves it out

    def _after(self, optimizer: Optimizer) -> None:
        for parameter, owner in self._owners(optimizer):
            parameter.data.copy_(broadcast(parameter.data, owner))
