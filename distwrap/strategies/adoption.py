"""Optimizers of parameters that a strategy has exchanged for others: they take over the new ones, or are refused."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from distwrap._internals.torch_sharding import has_gradient_hook
from distwrap.errors import ModelError
from distwrap.group.world import RunPart, World
from distwrap.strategies import shards


def replaced(old: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Let optimizers that hold parameters of a model go on with those that have taken their places.

    Whatever else holds an old one gets an error where it looks for its gradient, and the old numbers are freed.

    Args:
        old: the model's parameters as they were, by name, with those that have several.
        model: with the new ones.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    new = {id(parameter): now[name] for name, parameter in old.items() if parameter is not now[name]}
    for optimizer in (found for found in gc.get_objects() if issubclass(type(found), Optimizer)):
        for group in optimizer.param_groups:
            held = group["params"]
            for parameter in held:
                if id(parameter) in new:
                    shards.divide_optimizer_state(optimizer, parameter, new[id(parameter)])
            group["params"] = [new.get(id(parameter), parameter) for parameter in held]
    for parameter in old.values():
        if id(parameter) in new:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
            parameter.__class__ = ReplacedParameter


class ReplacedParameter(nn.Parameter):
    """A parameter from before `wrap_model`, in whose place the model has another."""

    @property
    def grad(self) -> Any:
        """Raise an error: no gradient comes here."""
        raise ModelError(
            "this parameter was replaced by wrap_model(), which divides the model: no gradient comes to it. Take "
            "model.parameters() of what wrap_model() has returned."
        )

    @grad.setter
    def grad(self, value: Any) -> None: ...


class Adoption(RunPart):
    """Look at each optimizer of divided parameters before its first step."""

    def __init__(self, world: World) -> None:
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._handle = register_optimizer_step_pre_hook(self._before)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        divided = [parameter for parameter in held if isinstance(parameter, DTensor)]
        if divided and isinstance(optimizer, torch.optim.LBFGS):
            raise ModelError(
                "LBFGS multiplies all parameters as one vector, and each rank has a share of them. Use a strategy "
                "whose ranks hold the whole model, as 'ddp', or an optimizer that goes by tensors, as AdamW."
            )
        if any(has_gradient_hook(parameter, after_accumulation=False) for parameter in divided):
            raise ModelError(
                "a divided parameter has a hook of register_hook(), which is never called: its gradient comes from an "
                "exchange. Use register_post_accumulate_grad_hook()."
            )
