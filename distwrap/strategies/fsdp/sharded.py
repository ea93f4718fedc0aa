"""Dividing a model: the mesh of its ranks, its units, the types in which it computes, and what the loop gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from distwrap._internals.torch import norm_classes
from distwrap._internals.torch_sharding import BeforeFSDP, has_gradient_hook
from distwrap.devices.memory import return_freed_memory
from distwrap.errors import ModelError, OptionError
from distwrap.group.collectives import broadcast
from distwrap.group.setup import require_group
from distwrap.group.world import RunPart, World, current_world, say_once
from distwrap.model.buffers import Buffers
from distwrap.model.empty import fill
from distwrap.model.transparent import unwrap_model
from distwrap.precision import InPrecision
from distwrap.strategies import shards
from distwrap.strategies.adoption import Adoption, Replacement
from distwrap.strategies.base import Wrapping
from distwrap.strategies.fsdp.model import DividedModel, FSDPRouting
from distwrap.strategies.fsdp.recomputation import recompute
from distwrap.strategies.fsdp.units import units_of

if TYPE_CHECKING:
    from distwrap.strategies.fsdp.strategy import FSDPStrategy

_SMALL = 10_000  # numbers a rank and unit, below which gathering takes longer than it saves memory


class Meshes(RunPart):
    """The meshes of ranks of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: dict[int, DeviceMesh] = {}

    def over(self, ranks: int) -> DeviceMesh:
        """Return the mesh in which each model is divided over so many ranks; every rank calls it."""
        if ranks not in self._made:
            size, kind = self._world.placement.world_size, self._world.device.type
            if ranks == size:
                self._made[ranks] = init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
            else:
                names = ("copy", "shard")
                self._made[ranks] = init_device_mesh(kind, (size // ranks, ranks), mesh_dim_names=names)
        return self._made[ranks]


def divided(model: nn.Module, world: World, wrapping: Wrapping, strategy: FSDPStrategy) -> nn.Module:
    """Divide a model over the ranks, and return what the loop trains."""
    require_group("wrap_model")
    net = unwrap_model(model)
    _refuse_hooks(net)
    return_freed_memory(current_world().device)
    wrapping.in_precision.precision.weights(net)
    mesh = world.part(Meshes).over(_ranks(strategy.shard, world))
    units = units_of(net, strategy.wrap)
    parameters = dict(net.named_parameters(remove_duplicate=False))
    before = BeforeFSDP(net)
    is_empty = any(parameter.is_meta for parameter in parameters.values())
    for parameter in parameters.values():
        parameter.data = parameter.data.contiguous()  # as FSDP wants them
    if not is_empty:
        _share(net, wrapping.device, strategy.cpu_offload)
    if strategy.checkpointing:
        recompute(units, selective=strategy.checkpointing == "selective")
    _say_what_is_small(net, units, mesh)
    _shard(net, units, mesh, wrapping, strategy)
    if is_empty:
        fill(net, torch.device("cpu") if strategy.cpu_offload else wrapping.device, drawn_seed(), shards.fill)
    replacement = Replacement(parameters, net)
    world.part(Adoption)
    name = str(world.count("model"))
    buffers = None if world.channel is None else Buffers(net, world.placement.rank, world.channel, name)
    routing = FSDPRouting(model, wrapping.in_precision, wrapping.forward_methods, buffers)

    def give_back(state: dict[str, torch.Tensor]) -> None:
        before.restore()
        replacement.undo(state)

    routing.give_back = give_back
    return DividedModel(routing)


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device, filled with numbers where it has none yet."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        fill(unwrap_model(model), device, drawn_seed())
    return model.to(device)


def drawn_seed() -> int:
    """Return a number drawn from torch's generator on rank 0, on every rank."""
    return int(broadcast(int(torch.randint(2**62, ()))))


def _ranks(shard: int | str | None, world: World) -> int:
    """Return over how many ranks a model is divided.

    Raises:
        OptionError: they do not divide the ranks into groups.
    """
    place = world.placement
    ranks = place.local_world_size if shard == "node" else shard or place.world_size
    assert isinstance(ranks, int)
    if place.world_size % ranks:
        what = f"shard={shard!r}, which is {ranks} ranks here" if shard == "node" else f"shard={shard}"
        raise OptionError(
            f"FSDPStrategy({what}): {place.world_size} ranks cannot be divided into groups of {ranks}. Take a divisor "
            f"of {place.world_size}."
        )
    return ranks


def _shard(
    net: nn.Module, units: list[nn.Module], mesh: DeviceMesh, wrapping: Wrapping, strategy: FSDPStrategy
) -> None:
    dtype = computed_in(wrapping.in_precision, net)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": strategy.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if strategy.cpu_offload else OffloadPolicy(),
    }
    norms = norms_of(net) if dtype is not None else []
    if norms:
        # Norms compute in float32 under autocast, on the CPU only with weights in it: one unit of all of them.
        fully_shard(norms, **{**options, "reshard_after_forward": False})
    for unit in units:
        fully_shard(unit, mp_policy=policy, **options)
    fully_shard(net, mp_policy=policy, **{**options, "reshard_after_forward": False if units else None})


def norms_of(net: nn.Module) -> list[nn.Module]:
    """Return the norms that have weights."""
    return [part for part in net.modules() if isinstance(part, norm_classes()) and [*part.parameters(recurse=False)]]


def computed_in(in_precision: InPrecision, net: nn.Module) -> torch.dtype | None:
    """Return the type in which autocast multiplies weights, if it is to: they are gathered in it then."""
    kind = in_precision.device.type
    with in_precision.context():
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    types = {parameter.dtype for parameter in net.parameters() if parameter.is_floating_point()}
    return dtype if types == {torch.float32} else None


def _share(net: nn.Module, device: torch.device, stays: bool) -> None:
    """Give every rank rank 0's weights, one tensor at a time, and put them on the device where they are not to stay."""
    for tensor in {id(value): value for value in (*net.parameters(), *net.buffers())}.values():
        tensor.data.copy_(broadcast(tensor.data))
    if not stays:
        net.to(device)


def _refuse_hooks(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if has_gradient_hook(parameter):
            raise ModelError(
                f"the parameter {name!r} has a gradient hook, which would be lost: FSDP exchanges the parameters. "
                f"Register it after wrap_model(), with register_post_accumulate_grad_hook()."
            )


def _say_what_is_small(net: nn.Module, units: list[nn.Module], mesh: DeviceMesh) -> None:
    numbers = sum(parameter.numel() for parameter in net.parameters())
    ranks = mesh.size(mesh.ndim - 1)
    if numbers / max(1, len(units)) / ranks < _SMALL:
        say_once(
            "small shards",
            f"strategy='fsdp': {type(net).__name__} has {numbers:,} parameters in {len(units) or 1} units, so that "
            f"{ranks} ranks hold shards of a few thousand numbers: it saves no memory worth the exchange. Use "
            f"strategy='ddp' if the model fits on one device.",
        )
    elif not units:
        say_once(
            "one unit",
            f"strategy='fsdp': {type(net).__name__} has no list of alike blocks, so all of it is gathered at once. "
            f"Name the classes that are to be gathered one by one: FSDPStrategy(wrap=['Block']).",
        )
