"""A strategy that divides each block of a model, and the model, by torch's FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import distwrap as dw
from distwrap import Strategy, unwrap_model
from distwrap.model.in_sync import Held
from distwrap.nesting import rebuilt


class Divided(Strategy):
    """Each rank holds rows of every weight; optimizers are made afterwards."""

    shards = True

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        mesh = init_device_mesh("cpu", (dw.world_size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def held(self, model: nn.Module) -> list[Held]:
        return [Held("nothing that is whole", "", 0.0)]

    def state(self, thing: Any, *, everywhere: bool = False) -> dict[str, Any]:
        plain = unwrap_model(thing) if isinstance(thing, nn.Module) else thing
        full: dict[str, Any] = rebuilt(
            plain.state_dict(), lambda leaf, _: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        )
        return full

    def parts(self, thing: Any) -> dict[str, Any] | None:
        state: dict[str, Any] = thing.state_dict()
        return state

    def parts_to_load(self, thing: Any, state: dict[str, Any]) -> dict[str, Any] | None:
        if isinstance(thing, nn.Module):
            like = thing.state_dict()
            return {name: empty(value, like[name]) for name, value in state.items()}
        parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
        empties = {
            index: {name: empty(value, parameters[index]) for name, value in one.items()}
            for index, one in state["state"].items()
        }
        return {**state, "state": empties}

    def load_state(self, thing: Any, state: dict[str, Any]) -> None:
        if isinstance(thing, nn.Module):
            like = thing.state_dict()
            thing.load_state_dict({name: divided(value, like[name]) for name, value in state.items()})
            return
        parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
        moved = {
            index: {name: divided(value, parameters[index]) for name, value in one.items()}
            for index, one in state["state"].items()
        }
        thing.load_state_dict({**state, "state": moved})


def divided(value: Any, like: Any) -> Any:
    if isinstance(value, DTensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)


def empty(value: Any, like: Any) -> Any:
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return torch.empty_like(like, dtype=value.dtype)


class Net(nn.Module):
    """Blocks of which no number of ranks divides the rows, a tied and a frozen weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.last = nn.Linear(5, 1, dtype=torch.float64)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result
