"""Optimizers of parameters that a strategy has exchanged for others: they take over the new ones, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from distwrap._internals.torch_sharding import has_gradient_hook
from distwrap.errors import ModelError
from distwrap.group.world import RunPart, World
from distwrap.live_objects import instances
from distwrap.strategies import shards
from distwrap.strategies.optimizer_share import refuse_whole


class Replacement:
    """Parameters of a model that a strategy has exchanged for others; optimizers that hold them go on with those.

    Whatever else holds an old one gets an error where it looks for its gradient, and the old numbers are freed.

    Args:
        old: the model's parameters as they were, by name, those with several names too.
        model: with the new ones.
    """

    def __init__(self, old: dict[str, nn.Parameter], model: nn.Module) -> None:
        now = dict(model.named_parameters(remove_duplicate=False))
        self._model = model
        self._old = {
            name: (parameter, type(parameter)) for name, parameter in old.items() if parameter is not now[name]
        }
        _exchange([(parameter, now[name]) for name, (parameter, _) in self._old.items()])
        for parameter, _ in self._old.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.__class__ = ReplacedParameter

    def undo(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put the old parameters back, with the numbers of a full state."""
        now, back = dict(self._model.named_parameters(remove_duplicate=False)), []
        for name, (parameter, kind) in self._old.items():
            parameter.__class__ = kind
            numbers = state[name].to(now[name].device)
            if parameter.is_meta:
                parameter = nn.Parameter(numbers, parameter.requires_grad)
            parameter.data = numbers
            module, _, own = name.rpartition(".")
            setattr(self._model.get_submodule(module), own, parameter)
            back.append((now[name], parameter))
        _exchange(back)


def _exchange(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Let the optimizers that hold the first of each pair go on with the second."""
    new = {id(before): after for before, after in pairs}
    for optimizer in instances(Optimizer):
        for group in optimizer.param_groups:
            held = group["params"]
            for parameter in held:
                if id(parameter) in new:
                    shards.divide_optimizer_state(optimizer, parameter, new[id(parameter)])
            group["params"] = [new.get(id(parameter), parameter) for parameter in held]


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
        if divided:
            refuse_whole(optimizer, in_pieces=True)
        if any(
            parameter.numel() and not parameter.untyped_storage().nbytes() for parameter in set(held) - set(divided)
        ):
            raise ModelError(
                f"this {type(optimizer).__name__} was made between a forward and its backward, when a part of the "
                f"model was gathered, and would train copies of it. Make it before the forward."
            )
        if any(has_gradient_hook(parameter, after_accumulation=False) for parameter in divided):
            raise ModelError(
                "a divided parameter has a hook of register_hook(), which is never called: its gradient comes from an "
                "exchange. Use register_post_accumulate_grad_hook()."
            )
