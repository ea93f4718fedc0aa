"""Divide a model: the mesh of its ranks, its units, the types in which it computes, and its wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from distwrap._internals.torch_sharding import BeforeFSDP, has_gradient_hook, is_in_pieces
from distwrap.devices.cpus import return_freed_memory
from distwrap.devices.transfer import move
from distwrap.errors import ModelError, OptionError
from distwrap.group.setup import require_group
from distwrap.group.world import Layout, World, current_world, say_once
from distwrap.model.buffers import Buffers
from distwrap.model.empty import drawn_seed, fill
from distwrap.model.transparent import unwrap_model
from distwrap.strategies import shards
from distwrap.strategies.base import Wrapping, take_rank_zero_weights
from distwrap.strategies.divided_tensors import DividedTensors, NamedInputs
from distwrap.strategies.fsdp.gathered import Gathered
from distwrap.strategies.fsdp.model import DividedModel, FSDPRouting
from distwrap.strategies.fsdp.plan_check import PlanCheck
from distwrap.strategies.fsdp.recomputation import recompute
from distwrap.strategies.fsdp.tensor_parallel import TensorParallel
from distwrap.strategies.fsdp.units import computed_in, norms_of, of_other_types, units_of
from distwrap.strategies.optimizer_scope import refuse_sparse
from distwrap.strategies.parameter_swap import OptimizerSync, ParameterSwap
from distwrap.strategies.shards import Meshes, mesh_over
from distwrap.versions import FSDP_ON_CPU_SINCE, require_torch

if TYPE_CHECKING:
    from distwrap.strategies.fsdp.strategy import FSDPStrategy


def divided(model: nn.Module, world: World, wrapping: Wrapping, strategy: FSDPStrategy) -> nn.Module:
    """Divide a model over the ranks, and return the model for the loop to train."""
    require_group("wrap_model")
    net = unwrap_model(model)
    _refuse(net)
    refuse_sparse(net, "strategy='fsdp'" if strategy.tensor_parallel is None else "tensor_parallel=")
    return_freed_memory(current_world().device)
    wrapping.in_precision.precision.weights(net)
    mesh = tensor_mesh = None
    if strategy.tensor_parallel is None:
        mesh = world.part(Meshes).over(_ranks(strategy.shard, world))
    else:
        mesh, tensor_mesh = _meshes_of_layout(world, strategy)
    if mesh is not None and wrapping.device.type == "cpu":
        why = "torch's FSDP2 runs on accelerators only, or not with copies"
        require_torch("strategy='fsdp' on the CPU", FSDP_ON_CPU_SINCE, why, "strategy='zero1'")
    units = units_of(net, strategy.wrap)
    parameters = dict(net.named_parameters(remove_duplicate=False))
    before = BeforeFSDP(net)
    is_empty = any(parameter.is_meta for parameter in parameters.values())
    for parameter in parameters.values():
        parameter.data = parameter.data.contiguous()  # FSDP needs contiguous parameters
    if not is_empty:
        take_rank_zero_weights(net)
        if not strategy.cpu_offload:
            move(net, wrapping.device)
    tensor_parallel = None
    if tensor_mesh is not None:
        tensor_parallel = TensorParallel(net, tensor_mesh, strategy.plan)
        if strategy.checks:
            PlanCheck(net, tensor_parallel)
        said = f"tensor_parallel={tensor_mesh.size()}:\n{tensor_parallel!r}"
        say_once("in groups", said)
    elif mesh is not None and not units:
        say_once(
            "one unit",
            f"strategy='fsdp': {type(net).__name__} has no list of identical blocks, so the whole model is "
            "gathered at once. Name the classes that should be gathered one by one: FSDPStrategy(wrap=['Block']).",
        )
    stop_recomputing = None
    if strategy.checkpointing:  # after the division, as a check computes copies of blocks
        inside = None if tensor_parallel is None else tensor_parallel.math.computing
        stop_recomputing = recompute(units, selective=strategy.checkpointing == "selective", inside=inside)
    gathered = Gathered(net)
    if mesh is not None:
        _shard(net, units, mesh, wrapping, strategy, gathered.after_forward)
    if is_empty:
        fill(net, torch.device("cpu") if strategy.cpu_offload else wrapping.device, drawn_seed(), shards.fill)
    swap = ParameterSwap(parameters, net)
    gathered.divided(world.part(OptimizerSync))
    world.part(DividedTensors)
    name = str(world.count("model"))
    buffers = None if world.channel is None else Buffers(net, world.placement.rank, world.channel, name)
    routing = FSDPRouting(model, wrapping.in_precision, wrapping.forward_methods, buffers, gathered)

    def restore_original(state: dict[str, torch.Tensor]) -> None:
        world.part(OptimizerSync).models.discard(gathered)
        if stop_recomputing is not None:
            stop_recomputing()
        if tensor_parallel is not None:
            tensor_parallel.undo()
        before.restore()
        swap.undo(state)

    world.part(NamedInputs).models.add(routing)
    if tensor_parallel is not None and tensor_mesh is not None:
        routing.cut(tensor_parallel, tensor_mesh.get_group(), is_divided=mesh is not None)
    return DividedModel(routing, tensor_parallel=routing.tensor_parallel, restore_original=restore_original)


def _ranks(shard: int | str | None, world: World) -> int:
    """Return over how many ranks a model is divided.

    Raises:
        OptionError: the ranks cannot be divided into groups of this size.
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
    net: nn.Module,
    units: list[nn.Module],
    mesh: DeviceMesh,
    wrapping: Wrapping,
    strategy: FSDPStrategy,
    after_forward: Callable[..., None],
) -> None:
    dtype, on_cpu = computed_in(wrapping.in_precision, net), wrapping.device.type == "cpu"
    for name, module in net.named_modules() if dtype is not None else ():
        buffers = getattr(module, "parametrizations", nn.Module()).buffers()
        if any(buffer.is_floating_point() for buffer in buffers) or hasattr(module, "weight_u"):
            raise ModelError(
                f"{name!r} has a parametrization with buffers, as of spectral_norm(), which would compute with weights "
                f"in {dtype} and buffers in float32. Use precision='32', or strategy='ddp'."
            )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": strategy.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if strategy.cpu_offload and not on_cpu else OffloadPolicy(),
        "shard_placement_fn": _placement,
    }
    for unit in [*units, net]:
        unit.register_forward_hook(after_forward)  # before FSDP's own hook, which frees the weights
    # The root needs no hook where its units have theirs: it stays gathered until its backward.
    # Norms compute in float32 under autocast, on the CPU only if their weights have it, so all norms are one unit.
    for modules in [norms_of(net)] if dtype is not None else of_other_types(net, units):
        if modules:
            fully_shard(modules, **{**options, "reshard_after_forward": False})
    for unit in units:
        fully_shard(unit, mp_policy=policy, **options)
    del options["reshard_after_forward"]  # a root without units stays gathered by torch's default
    if units:
        options["reshard_after_forward"] = False
    fully_shard(net, mp_policy=policy, **options)


def _placement(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension in which a parameter is divided: 1 if dimension 0 is cut in pieces, else the default."""
    return Shard(1) if isinstance(parameter, DTensor) and is_in_pieces(parameter.placements[0]) else None


def _meshes_of_layout(world: World, strategy: FSDPStrategy) -> tuple[DeviceMesh | None, DeviceMesh]:
    """Return the meshes over which FSDP divides (``None`` for one rank), and over which layers are divided.

    Raises:
        OptionError: the ranks were not arranged for this when the run began.
    """
    mesh = world.layout.mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or "tensor" not in names or mesh["tensor"].size() != tensor_ranks(strategy, world):
        raise OptionError(
            f"FSDPStrategy({_said(strategy)}) arranges the ranks when the run begins: give it to "
            "@distributed(strategy=…), not to wrap_model(strategy=…)."
        )
    return (mesh["shard"] if mesh["shard"].size() > 1 else None), mesh["tensor"]


def arranged(world: World, strategy: FSDPStrategy) -> Layout:
    """Arrange consecutive ranks in groups that take the same share of the data."""
    ranks = tensor_ranks(strategy, world)
    shares = world.placement.world_size // ranks
    mesh = mesh_over(world, (shares, ranks), ("shard", "tensor"))
    return Layout(world.placement.rank // ranks, shares, mesh.get_group("shard"), mesh)


def tensor_ranks(strategy: FSDPStrategy, world: World) -> int:
    """Return how many ranks form a group that takes the same share of the data.

    Raises:
        OptionError: the ranks, or those of a node, cannot be divided into groups of this size.
    """
    place, asked = world.placement, strategy.tensor_parallel
    ranks = place.local_world_size if asked == "node" else asked
    assert isinstance(ranks, int)
    if place.world_size % ranks or (place.nnodes > 1 and place.local_world_size % ranks):
        raise OptionError(
            f"FSDPStrategy({_said(strategy)}): {place.world_size} ranks, {place.local_world_size} on this "
            f"node, cannot be divided into groups of {ranks}. Take a divisor of both."
        )
    return ranks


def _said(strategy: FSDPStrategy) -> str:
    return f"tensor_parallel={strategy.tensor_parallel!r}"


def _refuse(net: nn.Module) -> None:
    """Refuse a model of which something would be lost when its parameters are replaced.

    Raises:
        ModelError: a parameter has a gradient hook or no dimension, or the model has no forward, or one that changes
            weights.
    """
    for name, module in net.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"{name!r} has max_norm={module.max_norm:g}, so that its forward changes its weight. In a "
                "divided model that is a copy, and the change would be lost. Leave max_norm out, or use strategy='ddp'."
            )
    if isinstance(net, (nn.ModuleList, nn.ModuleDict)):
        raise ModelError(
            f"strategy='fsdp' needs a model with a forward(), and a {type(net).__name__} has none: the loop "
            "calls its parts. Wrap each part, or a module whose forward() or methods call them."
        )
    for name, parameter in net.named_parameters():
        if not parameter.dim():
            raise ModelError(
                f"the parameter {name!r} is a single number without a dimension, which cannot be divided. Give "
                "it one dimension, as nn.Parameter(torch.tensor([1.0])), or use strategy='zero1'."
            )
        if has_gradient_hook(parameter):
            raise ModelError(
                f"the parameter {name!r} has a gradient hook, which would be lost, since FSDP replaces the "
                "parameters. Register it after wrap_model(), with register_post_accumulate_grad_hook()."
            )
