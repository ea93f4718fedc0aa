"""Private names of torch for divided models: FSDP2's states and gradients, modules, hooks, operators.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def set_timeout(group: Any, limit: timedelta) -> None:
    """Set the time limit of the collectives in a process group.

    Relies on ``torch.distributed.distributed_c10d:_set_pg_timeout``, if torch's groups have no method for it.
    Without it: a hang in a group of some ranks is noticed after half an hour, as with a backend that takes no limit.
    """
    if hasattr(group, "set_timeout"):
        with suppress(RuntimeError):  # some accelerators' backends take none
            group.set_timeout(limit)
    elif hasattr(distributed_c10d, "_set_pg_timeout"):
        distributed_c10d._set_pg_timeout(limit, group)


def skip_first_messages(stage: "PipelineStage") -> None:
    """Let a stage on the CPU send its neighbours nothing before the first pass.

    In torch 2.9 such a message has another type than the tensor that receives it, and gloo ends the process.

    Relies on ``torch.distributed.pipelining.stage:_PipelineStageBase._get_init_p2p_neighbors_ops`` (since torch 2.8 and
    before torch 2.15).
    Without it: torch sends no such message.
    """
    name = "_get_init_p2p_neighbors_ops"
    if stage.device.type == "cpu" and hasattr(stage, name):
        setattr(stage, name, list)


def silence_redistribution() -> None:
    """Keep torch from a warning at each clip of gradients: their norm is redistributed in several steps.

    Relies on ``torch.distributed.tensor._redistribute:logger``, which has the module's name.
    Without it: the warnings are printed.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _state_of(module: nn.Module) -> Any:
    """Return FSDP's state of a module, or ``None``.

    Relies on ``torch.distributed.fsdp:FSDPModule._get_fsdp_state``.
    Without it: methods other than forward() fail, and micro-batches are weighed by batches.
    """
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


def begin_fsdp_forward(model: nn.Module) -> None:
    """Run FSDP's steps before the forward of the whole model.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_forward``.
    Without it: methods that use parameters of the root module fail.
    """
    state = _state_of(model)
    if state is not None:
        state._pre_forward(model, (), {})


def end_fsdp_forward(model: nn.Module, output: Any) -> Any:
    """Run FSDP's steps after the forward of the whole model, and return the output.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._post_forward``.
    Without it: as for `begin_fsdp_forward`.
    """
    state = _state_of(model)
    return output if state is None else state._post_forward(model, None, output)


class BeforeFSDP:
    """State of a model's modules before FSDP divides them; later changes by the user are kept.

    Relies on ``torch.distributed._composable_state:_module_state_mapping``, ``torch.nn:Module()._forward_pre_hooks``,
    ``torch.nn:Module()._forward_hooks``, ``torch.nn:Module()._state_dict_pre_hooks``,
    ``torch.nn:Module()._load_state_dict_pre_hooks``, ``torch.nn:Module()._load_state_dict_post_hooks``,
    ``torch.distributed.tensor:distribute_module``, which marks the modules that it has changed.
    Without it: a model that went through a retrofit keeps FSDP's hooks.

    Args:
        model: the model, not yet divided.
    """

    _HOOKS = (
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_always_called"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
    _MARKS = ("_is_fsdp_", "_fsdp_")
    _CUT = ("_distwrap_local", "_distribute_module_applied")  # attributes left by tensor parallelism

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), set(vars(module)), self._hooks(module)) for module in model.modules()]

    def _hooks(self, module: nn.Module) -> dict[str, set[int]]:
        return {name: set(vars(module)[name]) for name in self._HOOKS if name in vars(module)}

    def restore(self) -> None:
        """Remove FSDP from the modules; the caller restores the parameters."""
        from torch.distributed import _composable_state

        mapping = getattr(_composable_state, "_module_state_mapping", {})
        for module, kind, names, hooks in self._modules:
            self._remove_hooks(module, hooks)
            added = [name for name in vars(module) if name not in names]
            if hasattr(module, "_get_fsdp_state") or not vars(module).keys().isdisjoint(self._CUT):
                module.__class__ = kind
                mapping.pop(module, None)
                added = [name for name in added if name == "forward" or name.startswith(("__", "_dist", *self._MARKS))]
            else:
                added = [name for name in added if name.startswith(self._MARKS)]
            for name in added:
                delattr(module, name)

    def _remove_hooks(self, module: nn.Module, before: dict[str, set[int]]) -> None:
        tables = {name: vars(module)[name] for name in before}
        for name, table in tables.items():
            for key in set(table) - before[name]:
                owner = getattr(getattr(table[key], "hook", table[key]), "__module__", None) or ""
                if owner.startswith(("torch.distributed.", "distwrap.strategies.")):
                    for each in tables.values():
                        each.pop(key, None)


def accumulated_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return gradients that are accumulated on this rank and not reduced yet.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["_unsharded_param"]``.
    Before torch 2.15 a gradient may be kept beside the weight in another type.
    Without it: `scale_loss` in a window of `accumulate` weighs micro-batches by the first one's count.
    """
    found = [grad for group in fsdp_groups(model) for param in group.fsdp_params for grad in _unreduced(param)]
    return list({id(grad): grad for grad in found if grad is not None}.values())  # torch 2.15 returns one twice


def _unreduced(param: Any) -> tuple[Any, Any]:
    grad = getattr(param, "unsharded_accumulated_grad", None)
    return grad, getattr(getattr(param, "_unsharded_param", None), "grad", None)


def has_unreduced(param: Any) -> bool:
    """Return whether an FSDP parameter has a gradient that is not reduced yet.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["_unsharded_param"]``.
    Without it: as for `accumulated_gradients` and `unreduced_parameters`.
    """
    return any(grad is not None for grad in _unreduced(param))


def fsdp_groups(model: nn.Module) -> list[Any]:
    """Return FSDP's parameter groups that are gathered together; inner ones come last.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup``.
    Without it: as for `accumulated_gradients` and `unreduced_parameters`.
    """
    return list({id(group): group for _, state in _states(model) for group in _groups(state)}.values())


def unreduced_parameters(groups: list[Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the names and shards of parameters with gradients that are not reduced yet.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["sharded_param"]``.
    Without it: gradients that were never averaged are not noticed.
    """
    params = [param for group in groups for param in group.fsdp_params]
    return [(str(getattr(param, "_param_fqn", "")), param.sharded_param) for param in params if has_unreduced(param)]


def gathered_copies(groups: list[Any]) -> set[int]:
    """Return the ids of the tensors that a forward uses in place of the parameters.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["_unsharded_param"]``.
    Without it: ``backward(inputs=…)`` of divided parameters silently gives no gradients.
    """
    return {id(getattr(param, "_unsharded_param", None)) for group in groups for param in group.fsdp_params}


def gathered(groups: list[Any]) -> list[Any]:
    """Return the groups whose parameters are gathered.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.is_unsharded``.
    Without it: as for `unreduced_parameters`, but only sometimes.
    """
    return [group for group in groups if getattr(group, "is_unsharded", False)]


def hook_fsdp_backward(module: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Let FSDP act in a backward of a module that passes through these tensors.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_backward``.
    Without it: a loss from an object that forward() returns trains nothing.
    """
    before = getattr(_state_of(module), "_pre_backward", None)
    for tensor in tensors if before is not None else ():
        tensor.register_hook(before)  # type: ignore[no-untyped-call]


def changed_parameters(module: nn.Module) -> list[str]:
    """Return the names of gathered parameters whose numbers differ from this rank's shard.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["_unsharded_param"]``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["padded_sharded_param_size"]``.
    Without it: changes of a weight in a forward are silently lost.
    """
    state, found = _state_of(module), []
    for group in gathered([] if state is None else _groups(state)):
        for param in group.fsdp_params:
            size = getattr(param, "padded_sharded_param_size", None)
            if size is None or not param.sharded_param.is_floating_point():
                continue
            own, whole = (
                getattr(each, "_local_tensor", each) for each in (param.sharded_param, param._unsharded_param)
            )
            if not own.numel():
                continue
            axis, rank = param.fsdp_placement.dim, param.mesh_info.shard_mesh_rank
            here = whole.detach().narrow(axis, rank * size[axis], own.size(axis))
            if not torch.allclose(here, own.detach().to(here), rtol=0, atol=0, equal_nan=True):
                found.append(str(getattr(param, "_param_fqn", "")))
    return found


def _states(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    for module in model.modules():
        state = _state_of(module)
        if state is not None:
            yield module, state


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of a state: one until torch 2.12, several since.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup``.
    """
    several = getattr(state, "_fsdp_param_groups", None)
    group = getattr(state, "_fsdp_param_group", None)
    return list(several) if several is not None else [] if group is None else [group]


# Modules, parameters and operators


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that initialises a module's parameters, or ``None``.

    Relies on ``torch.nn:MultiheadAttention._reset_parameters``, which other modules have as a public name.
    Without it: `init_empty` does not work with torch's attention.
    """
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether a module's buffer is in its state dict.

    Relies on ``torch.nn:Module()._non_persistent_buffers_set``.
    Without it: the answer is always yes.
    """
    return buffer not in getattr(module, "_non_persistent_buffers_set", ())


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which a tensor is a view, or ``None``.

    Relies on ``torch:Tensor._base``.
    Without it: changing a unit's output in place may lose gradients.
    """
    return getattr(tensor, "_base", None)


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has hooks for its gradient.

    Relies on ``torch:Tensor._backward_hooks``, ``torch:Tensor._post_accumulate_grad_hooks``.
    Without it: hooks from before a model was divided are silently lost.
    """
    return bool(getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None))


def products() -> set[Any]:
    """Return the operators that multiply matrices, with those of attention.

    Relies on ``torch:ops.aten._scaled_dot_product_flash_attention``,
    ``torch:ops.aten._scaled_dot_product_flash_attention_for_cpu``,
    ``torch:ops.aten._scaled_dot_product_efficient_attention``.
    Without it: attention is recomputed under ``checkpointing="selective"``.
    """
    aten: Any = torch.ops.aten
    attention = ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
    names = ["mm", "addmm", "bmm", "convolution", *(f"_scaled_dot_product_{kind}" for kind in attention)]
    return {getattr(aten, name).default for name in names if hasattr(aten, name)}


def shard_in_pieces(dimension: int, count: int) -> Any:
    """Return the placement of a tensor of `count` equal pieces, each divided over the ranks by itself.

    Relies on ``torch.distributed.tensor.placement_types:_StridedShard``.
    Without it: tensor parallelism cannot divide queries, keys and values in one weight.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dimension, split_factor=count)


def is_in_pieces(placement: Any) -> bool:
    """Return whether a placement may be one of `shard_in_pieces`.

    Relies on ``torch.distributed.tensor.placement_types:_StridedShard``.
    Without it: as for `shard_in_pieces`.
    """
    return type(placement).__name__ == "_StridedShard"


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the parameter dict of a module itself, to read and to change.

    Relies on ``torch.nn:Module()._parameters``.
    Without it: tensor parallelism cannot divide layers.
    """
    return module._parameters
