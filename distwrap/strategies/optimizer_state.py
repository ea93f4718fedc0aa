"""State of an optimizer that is divided over ranks: as a whole, as in one process, or in parts."""

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from distwrap.group.collectives import broadcast, gather_object
from distwrap.nesting import rebuilt
from distwrap.strategies.optimizer_share import OptimizerShare
from distwrap.strategies.owned_tensors import on_owner

_PIECE = "distwrap: a tensor of"  # marks a tensor of another rank among plain values


def full_state(own: dict[str, Any], owners: dict[int, int], *, everywhere: bool) -> dict[str, Any]:
    """Return the full state on the CPU, on rank 0 or everywhere; every rank calls it.

    The states of parameters are sent one after the other, so that no other rank ever holds all of them.

    Args:
        own: the state dict of this rank.
        owners: the rank that has the state of a parameter, by its number; rank 0 by default.
        everywhere: whether every rank needs it.
    """
    state: dict[Any, Any] = {}
    rank = dist.get_rank()
    there = gather_object([index for index in own["state"] if owners.get(index, 0) == rank])
    for owner, indices in enumerate(there):
        for index in indices:
            received = broadcast(own["state"].get(index), src=owner)
            if everywhere or rank == 0:
                state[index] = rebuilt(received, _on_cpu)
    return {**own, "state": _in_order(state)}


def state_in_parts(own: dict[str, Any], owners: dict[int, int]) -> dict[str, Any]:
    """Return the state for a sharded checkpoint, with each tensor as a ``DTensor`` on its owner; a collective."""
    rank = dist.get_rank()
    mine = {index: state for index, state in own["state"].items() if owners.get(index, 0) == rank}
    everyones = gather_object({index: rebuilt(state, _described) for index, state in mine.items()})
    state: dict[Any, Any] = {}
    for owner, described in enumerate(everyones):
        for index, values in described.items():

            def piece(leaf: Any, path: tuple[Any, ...], owner: int = owner, index: Any = index) -> Any:
                if not isinstance(leaf, tuple) or leaf[:1] != (_PIECE,):
                    return leaf
                _, shape, dtype, device = leaf
                local = torch.empty(0, dtype=dtype, device=device)
                if owner == rank:
                    local = mine[index]
                    for key in path:
                        local = local[key]
                return on_owner(local, shape, owner)

            state[index] = rebuilt(values, piece)
    return {**own, "state": _in_order(state)}


def parts_to_load(optimizer: Optimizer, share: OptimizerShare, state: dict[str, Any]) -> dict[str, Any]:
    """Return a stored state without the tensors of parameters that other ranks own."""
    others = {index for index, owner in share.owners_in(optimizer, state).items() if owner != share.rank}

    def needed(leaf: Any, path: tuple[Any, ...]) -> Any:
        return None if isinstance(leaf, torch.Tensor) and path[0] in others else leaf

    return {**state, "state": rebuilt(state["state"], needed)}


def own_state(optimizer: Optimizer, share: OptimizerShare) -> tuple[dict[str, Any], dict[Any, int]]:
    """Return this rank's part of the state, and the owner of each divided parameter by number."""
    with share.collecting():
        own = optimizer.state_dict()
    owners = {
        index: share.owners[parameter]
        for group, saved in zip(optimizer.param_groups, own["param_groups"], strict=True)
        for parameter, index in zip(group["params"], saved["params"], strict=True)
        if parameter in share.owners
    }
    return own, owners


def _in_order(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the states of parameters by number, in the order of one process."""
    known = sorted(state, key=lambda index: (not isinstance(index, int), index if isinstance(index, int) else 0))
    return {index: state[index] for index in known}


def _described(leaf: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        return _PIECE, tuple(leaf.shape), leaf.dtype, leaf.device.type
    return leaf


def _on_cpu(leaf: Any, path: tuple[Any, ...]) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
