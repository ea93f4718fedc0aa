"""Optimizers of parameters that a strategy has replaced: they take over the new ones, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from distwrap.errors import ModelError
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import RunPart, World, current_world
from distwrap.live_objects import instances
from distwrap.model.wrapped_models import WrappedModels
from distwrap.strategies import shards
from distwrap.strategies.optimizer_scope import refuse_whole


class ParameterSwap:
    """Parameters of a model that a strategy has replaced; optimizers that hold them take over the new ones.

    Any other use of an old parameter raises an error, and its memory is freed.

    Args:
        old: the model's old parameters by name, also by their further names.
        model: the model with the new parameters.
    """

    def __init__(self, old: dict[str, nn.Parameter], model: nn.Module) -> None:
        now = dict(model.named_parameters(remove_duplicate=False))
        self._model = model
        self._old = {
            name: (parameter, type(parameter)) for name, parameter in old.items() if parameter is not now[name]
        }
        _exchange([(parameter, now[name]) for name, (parameter, _) in self._old.items()])
        for parameter in {id(parameter): parameter for parameter, _ in self._old.values()}.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.__class__ = ReplacedParameter

    def undo(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put the old parameters back, with the numbers of a full state."""
        now, back = dict(self._model.named_parameters(remove_duplicate=False)), []
        made: dict[int, nn.Parameter] = {}  # for parameters that came without numbers
        for name, (parameter, kind) in self._old.items():
            parameter.__class__ = kind
            numbers = state[name].to(now[name].device)
            if parameter.is_meta:
                new = nn.Parameter(numbers, parameter.requires_grad)
                parameter = made.setdefault(id(parameter), new)
            parameter.data = numbers
            module, _, own = name.rpartition(".")
            setattr(self._model.get_submodule(module), own, parameter)
            back.append((now[name], parameter))
        _exchange(back, current_world().part(WrappedModels).optimizers_of_all_ranks())


def _exchange(pairs: list[tuple[nn.Parameter, nn.Parameter]], together: list[Optimizer] | None = None) -> None:
    """Replace the first parameter of each pair by the second in all optimizers.

    Args:
        pairs: parameters.
        together: the optimizers whose state all ranks put together, in this order; others lose it.
    """
    new = {id(before): after for before, after in pairs}
    for optimizer in instances(Optimizer) if together is None else together:
        for before, after in _replaced(optimizer, new):
            shards.divide_optimizer_state(optimizer, before, after)
    for optimizer in () if together is None else instances(Optimizer):
        for before, _ in _replaced(optimizer, new):
            optimizer.state.pop(before, None)


def _replaced(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Replace parameters of an optimizer, given the new ones by the ids of the old; return both of each."""
    pairs = []
    for group in optimizer.param_groups:
        pairs += [(each, new[id(each)]) for each in group["params"] if id(each) in new]
        group["params"] = [new.get(id(each), each) for each in group["params"]]
    return pairs


def _divide_state(optimizer: Optimizer) -> None:
    """Divide the whole state that ``optimizer.load_state_dict`` has loaded on every rank, like the parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shards.divide_optimizer_state(optimizer, parameter, parameter)


# Attributes that a replaced parameter keeps.
_STAY = {getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "requires_grad")}


class ReplacedParameter(nn.Parameter):
    """Parameter from before `wrap_model` that the model no longer has; any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _STAY:
            _refuse()
        return nn.Parameter.__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "ReplacedParameter()"

    def __deepcopy__(self, memo: Any) -> ReplacedParameter:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise ModelError(
        "wrap_model(), or the end of gathered_weights(), has divided the model and replaced this parameter, which has "
        "neither numbers nor a gradient any more. Use model.parameters() of the model that wrap_model() returned."
    )


class StepListener(Protocol):
    """Listener to the steps of all optimizers."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Act before a step."""

    def refuse_newcomers(self, held: set[int]) -> None:
        """Act before the first step of an optimizer that holds tensors with these ids."""


class OptimizerSync(RunPart):
    """Check of each optimizer of divided parameters before its first step.

    Attributes:
        models: the divided models to which something refers.
    """

    def __init__(self, world: World) -> None:
        self._seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # number of groups of each
        self.models: WeakSet[StepListener] = WeakSet()
        world.part(OptimizerSteps).listen(Phase.ADOPT, self._before)
        self._loads: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._loads.values():
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for model in self.models:
            model.before_step(optimizer)
        if self._seen.get(optimizer) == len(optimizer.param_groups):
            return
        self._seen[optimizer] = len(optimizer.param_groups)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        divided = [parameter for parameter in held if isinstance(parameter, DTensor)]
        if divided:
            refuse_whole(optimizer, in_pieces=True)
            if optimizer not in self._loads:
                self._loads[optimizer] = optimizer.register_load_state_dict_post_hook(_divide_state)
                _divide_state(optimizer)
        for model in self.models:
            model.refuse_newcomers(set(map(id, held)))
