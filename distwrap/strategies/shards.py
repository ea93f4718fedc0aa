"""Tensors and states that are divided over the ranks: gather, compare, fill and load them.

A tensor of which each rank has a shard is a ``DTensor``. One that some ranks have whole, and others not at all, as a
stage's weight or the state of a parameter that one rank steps, is known by its holders; as a part of a checkpoint it
is a ``DTensor`` on a mesh of its first holder alone.
Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from distwrap._internals.torch_sharding import is_in_pieces, set_timeout
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.checks.in_sync import ComparedTensor, left_to_ranks
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.nesting import rebuilt, refilled
from distwrap.strategies.optimizer_scope import PUTS_TOGETHER
from distwrap.wording import named_ranks

# The ranks that hold a tensor of a model, or the state of a parameter, by its id; others are shards, or on all ranks.
Holders = Mapping[int, Collection[int]]
_PIECE = "distwrap: a tensor of"  # marks a tensor of another rank among plain values


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


def _first_holder(tensor: DTensor) -> int | None:
    """Return the first rank that has the same shard as this one; ``None`` if no other rank has it."""
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert here is not None
    alike = [placement.is_replicate() and mesh.size(i) > 1 for i, placement in enumerate(tensor.placements)]
    if not any(alike):
        return None
    place = tuple(0 if same else at for same, at in zip(alike, here, strict=True))
    return int(mesh.mesh[place].item())


class Divided:
    """State of one model, or of one optimizer, of which each rank has a part.

    Args:
        thing: the model or optimizer.
        holders: the ranks that hold each tensor that is no shard, and not on all ranks.
    """

    def __init__(self, thing: nn.Module | Optimizer, holders: Holders) -> None:
        self._net = unwrap_model(thing) if isinstance(thing, nn.Module) else nn.Module()
        self._optimizer = None if isinstance(thing, nn.Module) else thing
        self._holders, self._rank = holders, dist.get_rank()

    def held(self) -> Iterator[ComparedTensor]:
        """Yield the tensors of the model that this rank has, with the ranks that have the same part."""
        own, size = left_to_ranks(self._net), dist.get_world_size()
        for name, value in (*self._net.named_parameters(), *self._net.named_buffers()):
            ranks = sorted(self._holders.get(id(value), range(size)))
            if name in own or self._rank not in ranks:
                continue
            if not isinstance(value, DTensor):
                yield ComparedTensor(name, "" if len(ranks) == size else f"{ranks[0]}: {named_ranks(ranks)}", value)
            elif (first := _first_holder(value)) is not None:
                yield ComparedTensor(name, f"{first}: the shard that rank {first} has", local(value))

    def state(self, *, everywhere: bool) -> dict[str, Any]:
        """Return a state with whole tensors on the CPU, on rank 0 or everywhere; every rank calls it.

        Other ranks get empty tensors. No rank holds more than one tensor beside its result.
        """
        wanted = everywhere or self._rank == 0
        known: dict[int, torch.Tensor] = {}  # a tensor that has several names is one

        def gathered(leaf: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in known:
                if isinstance(leaf, DTensor) and leaf.device_mesh.mesh.numel() == 1:
                    owner = int(leaf.device_mesh.mesh)
                    full = broadcast(leaf.to_local() if self._rank == owner else None, src=owner)
                else:
                    full = whole(leaf)
                known[id(leaf)] = full.cpu() if wanted else full.new_empty(0, device="cpu")
            return known[id(leaf)]

        return cast("dict[str, Any]", rebuilt(self._pieces(), gathered))

    def parts(self) -> dict[str, Any]:
        """Return a state for torch's distributed checkpoint, in which each rank's piece of a tensor is a box."""
        return cast("dict[str, Any]", rebuilt(self._pieces(), lambda leaf, path: _in_one_piece(leaf)))

    def needed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a stored state with an empty shard for each divided tensor, and without those of other ranks."""

        def like(pattern: Any, value: Any) -> Any:
            if not self._is_here(pattern):
                return rebuilt(value, lambda leaf, path: None if isinstance(leaf, torch.Tensor) else leaf)
            if not isinstance(pattern, DTensor) or not isinstance(value, torch.Tensor) or value.shape != pattern.shape:
                return value
            if is_in_pieces(pattern.placements[-1]):  # not a box: the whole is read, and then divided
                return value
            return torch.empty_like(pattern, dtype=value.dtype, requires_grad=False)

        if self._optimizer is None:
            patterns = self._net.state_dict(keep_vars=True)
            names = strip_module_prefix(state, target=patterns)
            pairs = zip(state.values(), names, strict=True)
            return cast("dict[str, Any]", refilled(state, [like(patterns.get(name), value) for value, name in pairs]))
        held = _by_number(self._optimizer, state)
        stored = {
            number: {name: like(held.get(number), value) for name, value in values.items()}
            if number in held
            else values
            for number, values in state["state"].items()
        }
        return {**state, "state": stored}

    def load(self, state: dict[str, Any]) -> None:
        """Load a state of whole or divided tensors into the model or optimizer."""
        if self._optimizer is None:
            self._net.load_state_dict(divided_state(self._net, state))
            return
        held = _by_number(self._optimizer, state)
        divided = {
            number: {name: _like_parameter(held[number], value) for name, value in values.items()}
            if number in held
            else values
            for number, values in state["state"].items()
            if self._is_here(held.get(number))
        }
        self._optimizer.load_state_dict({**state, "state": divided})

    def _pieces(self) -> dict[str, Any]:
        """Return a state with a ``DTensor`` for each tensor that this rank does not have whole; a collective."""
        if self._optimizer is not None:
            return self._pieces_of_optimizer(self._optimizer)
        made: dict[int, Any] = {}

        def piece(leaf: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in made:
                made[id(leaf)] = (
                    _of_owner(leaf, min(self._holders[id(leaf)])) if id(leaf) in self._holders else leaf.detach()
                )
            return made[id(leaf)]

        return cast("dict[str, Any]", rebuilt(self._net.state_dict(keep_vars=True), piece))

    def _pieces_of_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        token = PUTS_TOGETHER.set(True)
        try:
            own = optimizer.state_dict()
        finally:
            PUTS_TOGETHER.reset(token)
        if not self._holders:
            return own
        owners = {number: min(self._holders.get(id(each), (0,))) for number, each in _by_number(optimizer, own).items()}
        mine = {number: state for number, state in own["state"].items() if owners.get(number, 0) == self._rank}
        everyones = gather_object({number: rebuilt(state, _described) for number, state in mine.items()})
        state: dict[Any, Any] = {}
        for owner, described in enumerate(everyones):
            for number, values in described.items():

                def piece(leaf: Any, path: tuple[Any, ...], owner: int = owner, number: Any = number) -> Any:
                    if not isinstance(leaf, tuple) or leaf[:1] != (_PIECE,):
                        return leaf
                    _, shape, dtype, device = leaf
                    local = torch.empty(0, dtype=dtype, device=device)
                    if owner == self._rank:
                        local = mine[number]
                        for key in path:
                            local = local[key]
                    return on_owner(local, shape, owner)

                state[number] = rebuilt(values, piece)
        known = sorted(
            state, key=lambda number: (not isinstance(number, int), number if isinstance(number, int) else 0)
        )
        return {**own, "state": {number: state[number] for number in known}}  # in the order of one process

    def _is_here(self, tensor: torch.Tensor | None) -> bool:
        return id(tensor) not in self._holders or self._rank in self._holders[id(tensor)]


def divided_state(net: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state, with a wrapper's prefix or without, with the keys and shards of the model.

    A ``None`` in it stands for a tensor that other ranks hold.
    """
    patterns = net.state_dict(keep_vars=True)
    given = strip_module_prefix(state if isinstance(state, dict) else dict(state), target=net)

    def like(name: str, value: Any) -> Any:
        pattern = patterns.get(name)
        return pattern if value is None else divided_like(pattern, value) if isinstance(pattern, DTensor) else value

    divided = [like(name, value) for name, value in given.items()]
    return cast("dict[str, Any]", refilled(given, divided))  # keeps the versions of modules


def divide_optimizer_state(optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor) -> None:
    """Move an optimizer's state from an old parameter to a new one, and divide it like that."""
    if old in optimizer.state:
        values = optimizer.state.pop(old)
        optimizer.state[new] = {name: _like_parameter(new, value) for name, value in values.items()}


def _described(leaf: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        return _PIECE, tuple(leaf.shape), leaf.dtype, leaf.device.type
    return leaf


def _of_owner(tensor: torch.Tensor, owner: int) -> torch.Tensor:
    """Return a tensor as one piece on its owner; a number alone is sent to all."""
    is_mine = dist.get_rank() == owner
    if not tensor.dim():
        return broadcast(tensor.detach() if is_mine else None, src=owner)
    empty = torch.empty(0, dtype=tensor.dtype, device=current_world().device)
    return on_owner(tensor.detach().contiguous() if is_mine else empty, tuple(tensor.shape), owner)


def on_owner(local: torch.Tensor, shape: tuple[int, ...], owner: int) -> DTensor:
    """Return a ``DTensor`` that is whole on its owner; every rank calls it in the same order.

    Args:
        local: the whole tensor on its owner, and an empty one of its type and device on other ranks.
        shape: the shape of the tensor.
        owner: the rank that has it.
    """
    mesh = current_world().part(Meshes).of_owner(owner, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=torch.Size(shape), stride=stride)


class Meshes(RunPart):
    """Meshes of the ranks of one run, each made once; every rank asks for them in the same order."""

    def __init__(self, world: World) -> None:
        self._world, self._size = world, world.placement.world_size
        self._over: dict[int, DeviceMesh] = {}
        self._owners: dict[str, list[DeviceMesh]] = {}

    def over(self, ranks: int) -> DeviceMesh:
        """Return the mesh that divides a model over so many ranks."""
        if ranks not in self._over:
            copies = self._size // ranks
            shape, names = ((copies, ranks), ("copy", "shard")) if copies > 1 else ((ranks,), ("shard",))
            self._over[ranks] = mesh_over(self._world, shape, names)
        return self._over[ranks]

    def of_owner(self, owner: int, device: str) -> DeviceMesh:
        """Return the mesh of one rank, for tensors that only it has."""
        if device not in self._owners:
            self._owners[device] = [DeviceMesh(device, [rank]) for rank in range(self._size)]
        return self._owners[device][owner]


def _by_number(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the parameters of an optimizer by their numbers in a state."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(saved, (each for group in optimizer.param_groups for each in group["params"]), strict=False))


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


def _in_one_piece(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    placements = [Replicate() if placement.is_partial() else placement for placement in leaf.placements]
    if is_in_pieces(leaf.placements[-1]):
        placements[-1] = Shard(0)
    with torch.no_grad():
        return leaf if placements == list(leaf.placements) else leaf.redistribute(placements=placements)


def mesh_over(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks, whose groups have the time limit of the run; every rank calls it.

    torch would give the groups of a mesh a time limit of half an hour.

    Args:
        world: the world of the run.
        shape: the number of ranks in each dimension.
        names: the names of the dimensions.
    """
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    for name in names:
        set_timeout(mesh.get_group(name), timedelta(seconds=world.options.timeout))
    return mesh
