"""Styles of tensor parallelism: torch's own for layers, and others for packed layers, attention and whole modules.

A style places the parameters of one module on the ranks of a tensor-parallel group, as ``DTensor``s.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from distwrap._internals.torch_sharding import own_parameters, shard_in_pieces
from distwrap.strategies.fsdp.attention import attend
from distwrap.strategies.fsdp.pieces import Running, unmark

_LOCAL = "_distwrap_local"


def style_of(word: str, running: Running, *, by_sequence: bool = False) -> ParallelStyle:
    """Return the style for a word of a plan.

    Args:
        word: ``"colwise"``, ``"rowwise"``, ``"packed3"``, ``"heads"``, ``"gathered"``, ``"vocabulary"``, ``"whole"``.
        running: the running forwards of the model.
        by_sequence: whether inputs and outputs are pieces of the sequence.
    """
    outside = Shard(1) if by_sequence else Replicate()
    if word == "colwise":
        return ColwiseParallel(input_layouts=outside)
    if word == "rowwise":
        return Rowwise(running, outside)
    if word == "gathered":
        return ColwiseParallel(output_layouts=Replicate())
    if word == "vocabulary":
        return RowwiseParallel(input_layouts=Replicate())
    if word == "heads":
        return Attention(running, outside)
    if packed := re.fullmatch(r"packed(\d)", word):
        return Packed(running, int(packed[1]), outside)
    return Whole(running, sums=by_sequence)


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return this rank's piece of a tensor that every rank has, without an exchange."""
    alike = DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)
    return alike.redistribute(placements=[placement])


def enter(tensor: torch.Tensor, mesh: DeviceMesh, comes: Placement | None = None) -> torch.Tensor:
    """Return a tensor with which each rank computes another part, so that its gradient is their sum."""
    given = DTensor.from_local(tensor, mesh, [comes or Replicate()], run_check=False)
    local: torch.Tensor = given.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return local


def leave(tensor: torch.Tensor, mesh: DeviceMesh, goes: Placement | None = None) -> torch.Tensor:
    """Return the sum of the ranks' tensors, or a piece of it."""
    local: torch.Tensor = (
        DTensor.from_local(tensor, mesh, [Partial()], run_check=False).redistribute(placements=[goes or Replicate()])
    ).to_local()
    return unmark(local)


def cut_along(tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Return this rank's piece of a tensor that every rank has; the gradient is put together from all pieces."""
    alike = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    piece: torch.Tensor = alike.redistribute(placements=[Shard(axis)]).to_local()
    return piece


def put_together(tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Return the whole of a tensor of which each rank has a piece; each rank gets its piece of the gradient."""
    pieces = DTensor.from_local(tensor, mesh, [Shard(axis)], run_check=False)
    whole: torch.Tensor = pieces.redistribute(placements=[Replicate()]).to_local()
    return whole


class Whole(ParallelStyle):
    """Style of a module that every rank has as a whole, with parameters that are ``DTensor``s as all others.

    Attributes:
        sums: whether each rank's gradient comes from another part of the data.
    """

    def __init__(self, running: Running, *, sums: bool = False) -> None:
        super().__init__()
        self.running, self.sums = running, sums

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the placements of the parameters that are divided."""
        return {}

    def picks(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Return functions that pick this rank's part from whole parameters."""
        return {}

    def forward(self, mesh: DeviceMesh) -> Callable[..., Any] | None:
        """Return a replacement of the module's forward."""
        return None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        local = _Local(self, device_mesh, self.picks(module, device_mesh))
        cut = self.placements(module)
        known = self.running.known
        for name, parameter in list(own_parameters(module).items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in known:
                new = nn.Parameter(spread(parameter, device_mesh, cut.get(name, Replicate())), parameter.requires_grad)
                known[id(parameter)] = parameter, new
            own_parameters(module)[name] = known[id(parameter)][1]
        if self.sums:
            local.summed.update(set(own_parameters(module)) - cut.keys())
        local.summed.update(local.picks)
        module.__dict__[_LOCAL] = local
        names = tuple(name for name, value in own_parameters(module).items() if value is not None)
        module.__class__ = _localised(cast("Hashable", type(module)), names, self.forward(device_mesh) is not None)
        return module


class Packed(Whole):
    """Style of a layer with several projections in one weight, each divided by itself, as queries, keys and values."""

    def __init__(self, running: Running, count: int, comes: Placement) -> None:
        super().__init__(running)
        self.count, self.comes = count, comes

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {"weight": shard_in_pieces(0, self.count)}

    def picks(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        has_bias = own_parameters(module).get("bias") is not None
        return {"bias": _own_pieces(self.count, mesh)} if has_bias else {}

    def forward(self, mesh: DeviceMesh) -> Callable[..., Any]:
        def run(module: Any, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(enter(x, mesh, self.comes), module.weight, module.bias)

        return run


class Rowwise(Whole):
    """Style of a layer divided by inputs, whose bias has one gradient on all ranks, also with sequence pieces."""

    def __init__(self, running: Running, goes: Placement) -> None:
        super().__init__(running, sums=goes != Replicate())
        self.goes = goes

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {"weight": Shard(1)}

    def forward(self, mesh: DeviceMesh) -> Callable[..., Any]:
        def run(module: Any, x: torch.Tensor) -> torch.Tensor:
            found = leave(nn.functional.linear(x, module.weight), mesh, self.goes)
            return found if module.bias is None else found + module.bias

        return run


class Attention(Whole):
    """Style of an ``nn.MultiheadAttention`` of which each rank computes some heads."""

    def __init__(self, running: Running, comes: Placement) -> None:
        super().__init__(running)
        self.comes = comes

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {"in_proj_weight": shard_in_pieces(0, 3)}

    def picks(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        return {"in_proj_bias": _own_pieces(3, mesh)} if own_parameters(module).get("in_proj_bias") is not None else {}

    def forward(self, mesh: DeviceMesh) -> Callable[..., Any]:
        def run(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            given = {id(tensor): enter(tensor, mesh, self.comes) for tensor in (query, key, value)}
            query, key, value = (given[id(tensor)] for tensor in (query, key, value))
            return attend(module, mesh, query, key, value, *args, **kwargs)

        return run

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parallelize_module(module.get_submodule("out_proj"), device_mesh, Rowwise(self.running, self.comes))
        return super()._apply(module, device_mesh)


class _Local:
    """View of one module's parameters on this rank.

    Attributes:
        summed: names of whole parameters whose gradients are summed over the ranks.
    """

    def __init__(self, style: Whole, mesh: DeviceMesh, picks: dict[str, Callable[[Any], Any]]) -> None:
        self.style, self.mesh, self.picks = style, mesh, picks
        self.summed: set[str] = set()
        self.forward = style.forward(mesh)

    def __deepcopy__(self, memo: Any) -> _Local:
        return self

    def read(self, parameter: Any, name: str) -> Any:
        """Return a parameter, within a forward as a plain tensor of this rank."""
        if not self.style.running or not isinstance(parameter, DTensor) or parameter.device_mesh != self.mesh:
            return parameter
        found = parameter.to_local()
        if name in self.summed:
            found = enter(found, self.mesh)
        return self.picks[name](found) if name in self.picks else found


def summed_of(module: nn.Module) -> set[str] | None:
    """Return the set of a module's parameters whose gradients are summed, or ``None`` if it cannot have any."""
    local = module.__dict__.get(_LOCAL)
    return None if local is None else local.summed


def _own_pieces(count: int, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    def pick(whole: torch.Tensor) -> torch.Tensor:
        pieces: torch.Tensor = whole.view(count, mesh.size(), -1)[:, mesh.get_local_rank()].flatten()
        return pieces

    return pick


@cache
def _localised(kind: Any, names: tuple[str, ...], has_forward: bool) -> type[nn.Module]:
    """Return a class whose parameters are plain tensors in a forward, as torchtitan's SimpleFSDP does."""
    members: dict[str, Any] = {name: _reader(name) for name in names}
    if has_forward:
        members["forward"] = lambda module, *args, **kwargs: vars(module)[_LOCAL].forward(module, *args, **kwargs)
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**members, **about})


def _reader(name: str) -> property:
    return property(lambda module: vars(module)[_LOCAL].read(own_parameters(module)[name], name))
