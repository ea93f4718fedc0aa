"""Functions for tensors of which each rank holds a shard (``DTensor``): gather, compare, and fill from whole ones.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from distwrap._internals.torch_sharding import is_in_pieces
from distwrap.model.checks.in_sync import ComparedTensor, left_to_ranks
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.nesting import rebuilt, refilled


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's numbers of a tensor, as a view."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all of its numbers; every rank that has a shard calls it."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(pattern: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor that all ranks have whole, if the pattern is a ``DTensor``; no exchange."""
    if not isinstance(pattern, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return on_all_ranks(pattern, tensor).redistribute(placements=pattern.placements)


def on_all_ranks(pattern: DTensor, tensor: torch.Tensor) -> DTensor:
    """Return a tensor that each rank has whole as a replicated ``DTensor`` on the mesh of a pattern."""
    mesh = pattern.device_mesh
    whole = tensor.detach().to(pattern.to_local().device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill this rank's shard of a tensor from the whole."""
    local(tensor).copy_(local(divided_like(tensor, whole)))


def held(model: nn.Module) -> Iterator[ComparedTensor]:
    """Yield the tensors of a model of which several ranks have the same part."""
    own = left_to_ranks(model)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in own:
            continue
        if not isinstance(value, DTensor):
            yield ComparedTensor(name, "", value)
        elif (first := _first_holder(value)) is not None:
            yield ComparedTensor(name, f"{first}: the shard that rank {first} has", local(value))


def _first_holder(tensor: DTensor) -> int | None:
    """Return the first rank that has the same shard as this one; ``None`` if no other rank has it."""
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert here is not None
    alike = [placement.is_replicate() and mesh.size(i) > 1 for i, placement in enumerate(tensor.placements)]
    if not any(alike):
        return None
    place = tuple(0 if same else at for same, at in zip(alike, here, strict=True))
    return int(mesh.mesh[place].item())


def full_state(thing: nn.Module | Optimizer, *, everywhere: bool) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU, on rank 0 or everywhere; every rank calls it.

    Other ranks get empty tensors instead of divided ones. No rank holds more than one tensor beside its result.
    """
    plain = unwrap_model(thing) if isinstance(thing, nn.Module) else thing
    wanted = everywhere or dist.get_rank() == 0

    def gathered(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        full = whole(leaf.detach())
        return full.cpu() if wanted else full.new_empty(0, device="cpu")

    return cast("dict[str, Any]", rebuilt(plain.state_dict(), gathered))


def load_full_state(thing: nn.Module | Optimizer, state: dict[str, Any]) -> None:
    """Load a state of whole or divided tensors into a model or optimizer of divided tensors."""
    if isinstance(thing, nn.Module):
        net = unwrap_model(thing)
        net.load_state_dict(divided_state(net, state))
        return
    numbered = [parameter for group in thing.param_groups for parameter in group["params"]]
    divided = {
        number: {name: _like_parameter(parameter, value) for name, value in state["state"][number].items()}
        for number, parameter in enumerate(numbered)
        if number in state["state"]
    }
    thing.load_state_dict({**state, "state": {**state["state"], **divided}})


def divided_state(net: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state, with a wrapper's prefix or without, with the keys and shards of the model."""
    patterns = net.state_dict()
    given = strip_module_prefix(state if isinstance(state, dict) else dict(state), target=net)
    pairs = given.items()
    divided = [divided_like(patterns[name], value) if name in patterns else value for name, value in pairs]
    return cast("dict[str, Any]", refilled(given, divided))  # keeps the versions of modules


def empty_shards(thing: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a stored state with an empty shard for each tensor that a model or optimizer has divided."""

    def like(pattern: Any, value: Any) -> Any:
        if not isinstance(pattern, DTensor) or not isinstance(value, torch.Tensor) or value.shape != pattern.shape:
            return value
        if is_in_pieces(pattern.placements[-1]):  # not a box: the whole is read, and then divided
            return value
        return torch.empty_like(pattern, dtype=value.dtype, requires_grad=False)

    if isinstance(thing, nn.Module):
        net = unwrap_model(thing)
        names, patterns = strip_module_prefix(state, target=net), dict(net.state_dict())
        pairs = zip(state.values(), names, strict=True)
        return cast("dict[str, Any]", refilled(state, [like(patterns.get(name), value) for value, name in pairs]))
    numbered = [parameter for group in thing.param_groups for parameter in group["params"]]
    stored = {
        number: {name: like(numbered[number], value) for name, value in values.items()}
        if number in range(len(numbered))
        else values
        for number, values in state["state"].items()
    }
    return {**state, "state": stored}


def _like_parameter(parameter: torch.Tensor, value: Any) -> Any:
    """Return an optimizer's value for a parameter: divided like it if it has its shape, else whole."""
    if isinstance(value, DTensor) and not isinstance(parameter, DTensor):
        return whole(value)
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if value.shape == parameter.shape:
        return divided_like(parameter, value)
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):  # as a mean of each row, on all ranks
        return on_all_ranks(parameter, value)
    return value


def parts(thing: nn.Module | Optimizer) -> dict[str, Any]:
    """Return a state for torch's distributed checkpoint, in which each rank's piece of a tensor is a box."""
    plain = unwrap_model(thing) if isinstance(thing, nn.Module) else thing
    return cast("dict[str, Any]", rebuilt(plain.state_dict(), lambda leaf, path: _in_one_piece(leaf)))


def _in_one_piece(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    placements = [Replicate() if placement.is_partial() else placement for placement in leaf.placements]
    if is_in_pieces(leaf.placements[-1]):
        placements[-1] = Shard(0)
    with torch.no_grad():
        return leaf if placements == list(leaf.placements) else leaf.redistribute(placements=placements)


def divide_optimizer_state(optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor) -> None:
    """Move an optimizer's state from an old parameter to a new one, and divide it like that."""
    if old in optimizer.state:
        values = optimizer.state.pop(old)
        optimizer.state[new] = {name: _like_parameter(new, value) for name, value in values.items()}
