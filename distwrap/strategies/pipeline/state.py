"""Full states of a model in stages and of its optimizers, put together tensor by tensor, and states in parts."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distwrap.model.state_dict import strip_module_prefix
from distwrap.nesting import refilled
from distwrap.strategies.optimizer_state import full_state, state_in_parts
from distwrap.strategies.owned_tensors import on_owner
from distwrap.strategies.pipeline.placement import Placement
from distwrap.strategies.pipeline.remote import is_here


class States:
    """States of models and their optimizers.

    Args:
        models: the user's models in stages, with the ranks that hold their tensors.
        device: the device of this rank.
    """

    def __init__(self, models: list[tuple[nn.Module, Placement]], device: torch.device) -> None:
        self._net, self._device = models[0][0], device
        self._owners = {key: rank for _, placement in models for key, rank in placement.owners().items()}

    def of_model(self, *, everywhere: bool) -> dict[str, Any]:
        """Return the model's state dict, or an empty one on ranks that do not need it; a collective."""
        state, known = self._net.state_dict(keep_vars=True), {}
        wanted = everywhere or dist.get_rank() == 0
        for name, tensor in list(state.items()):
            if isinstance(tensor, torch.Tensor):
                if id(tensor) not in known:
                    known[id(tensor)] = self._brought(tensor, wanted)
                state[name] = known[id(tensor)]
        if not wanted:
            state.clear()
        return state

    def of_optimizer(self, optimizer: Optimizer, *, everywhere: bool) -> dict[str, Any]:
        """Return an optimizer's state dict for all parameters; a collective."""
        return full_state(optimizer.state_dict(), self._owners_of(optimizer), everywhere=everywhere)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state dict for the parameters on this rank."""
        here = self._numbers_here(optimizer, state)
        mine = {index: entry for index, entry in state["state"].items() if index in here}
        optimizer.load_state_dict({**state, "state": mine})

    def needed(self, thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return a stored state of the model or an optimizer without the tensors of other stages."""
        if isinstance(thing, nn.Module):
            own = self._net.state_dict(keep_vars=True)
            names = strip_module_prefix(state, target=own)
            pairs = zip(state.values(), names, strict=True)
            found = refilled(state, [value if is_here(own.get(name, value)) else None for value, name in pairs])
            return cast("dict[str, Any]", found)
        here = self._numbers_here(thing, state)
        kept = {
            index: {key: value if index in here else None for key, value in entry.items()}
            for index, entry in state["state"].items()
        }
        return {**state, "state": kept}

    def load_model(self, state: dict[str, Any]) -> None:
        """Load a state dict with all tensors, or with those on this rank."""
        own = self._net.state_dict(keep_vars=True)
        given = strip_module_prefix(state, target=own)
        pairs = given.items()
        self._net.load_state_dict(refilled(given, [own.get(name) if value is None else value for name, value in pairs]))

    def parts_of_model(self) -> dict[str, Any]:
        """Return the model's state dict with each tensor as one piece on its owner; a number alone is sent to all."""
        state = self._net.state_dict(keep_vars=True)
        for name, tensor in list(state.items()):
            if isinstance(tensor, torch.Tensor):
                owner, mine = self._owners[id(tensor)], tensor.detach()
                if not mine.dim():
                    state[name] = self._brought(tensor, wanted=True)
                    continue
                here = dist.get_rank() == owner
                local = mine.contiguous() if here else torch.empty(0, dtype=mine.dtype, device=self._device)
                state[name] = on_owner(local, tuple(mine.shape), owner)
        return state

    def parts_of_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict with each tensor as one piece on its owner."""
        return state_in_parts(optimizer.state_dict(), self._owners_of(optimizer))

    def _numbers_here(self, optimizer: Optimizer, state: dict[str, Any]) -> set[Any]:
        """Return the parameter numbers in a stored state without those of other stages."""
        saved = [index for group in state["param_groups"] for index in group["params"]]
        pairs = zip(saved, _parameters(optimizer), strict=False)
        return set(state["state"]) - {index for index, parameter in pairs if not is_here(parameter)}

    def _owners_of(self, optimizer: Optimizer) -> dict[int, int]:
        """Return the rank that has the state of each parameter of an optimizer, by the parameter's number."""
        return {index: self._owners.get(id(each), 0) for index, each in enumerate(_parameters(optimizer))}

    def _brought(self, tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
        owner = self._owners[id(tensor)]
        mine = dist.get_rank() == owner
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        numbers = tensor.detach().contiguous() if mine else empty
        dist.broadcast(numbers, src=owner)
        return numbers.cpu() if wanted else torch.empty(0)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
