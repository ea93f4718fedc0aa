"""Private names of torch for models that are divided: FSDP2's states and gradients, modules, hooks, operators.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def _state_of(module: nn.Module) -> Any:
    """Return FSDP's state of a module, or ``None``.

    Relies on ``torch.distributed.fsdp:FSDPModule._get_fsdp_state``.
    Without it: methods other than forward() fail, and micro-batches are weighed by batches.
    """
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


def begin_fsdp_forward(model: nn.Module) -> None:
    """Do what FSDP does before the forward of the whole model.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_forward``.
    Without it: a method that uses parameters of the model itself fails.
    """
    state = _state_of(model)
    if state is not None:
        state._pre_forward(model, (), {})


def end_fsdp_forward(model: nn.Module, output: Any) -> Any:
    """Do what FSDP does after the forward of the whole model, and return the output.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._post_forward``.
    Without it: as for `begin_fsdp_forward`.
    """
    state = _state_of(model)
    return output if state is None else state._post_forward(model, None, output)


def leave_fsdp_forward(model: nn.Module) -> None:
    """Bring FSDP back to where the next forward can begin, after an exception in the midst of one.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState()._training_state``,
    ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState()._state_ctx``.
    Without it: a loop that goes on after an exception in a forward gets wrong gradients of its next one.
    """
    for module, state in _states(model):
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        for group in _groups(state):
            group._training_state = type(group._training_state).IDLE
        module.reshard()


class BeforeFSDP:
    """Memory of what a model's modules were before FSDP divides them; what their owner changes later stays.

    Relies on ``torch.distributed._composable_state:_module_state_mapping``, ``torch.nn:Module()._forward_pre_hooks``,
    ``torch.nn:Module()._forward_hooks``, ``torch.nn:Module()._state_dict_pre_hooks``,
    ``torch.nn:Module()._load_state_dict_pre_hooks``, ``torch.nn:Module()._load_state_dict_post_hooks``,
    ``torch.distributed.tensor:distribute_module``, which marks what it has changed.
    Without it: a model that went through a retrofit keeps FSDP's hooks.

    Args:
        model: to remember.
    """

    _HOOKS = (
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_always_called"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
    _CUT = ("_distwrap_local", "_distribute_module_applied")  # what tensor parallelism leaves

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), set(vars(module)), self._hooks(module)) for module in model.modules()]

    def _hooks(self, module: nn.Module) -> dict[str, set[int]]:
        return {name: set(vars(module)[name]) for name in self._HOOKS if name in vars(module)}

    def restore(self) -> None:
        """Take FSDP off the modules; their parameters are for the caller to exchange."""
        from torch.distributed import _composable_state

        mapping = getattr(_composable_state, "_module_state_mapping", {})
        for module, kind, names, hooks in self._modules:
            if hasattr(module, "_get_fsdp_state") or not vars(module).keys().isdisjoint(self._CUT):
                module.__class__ = kind
                for name, before in hooks.items():
                    for key in set(vars(module)[name]) - before:
                        del vars(module)[name][key]
                for name in [name for name in vars(module) if name not in names]:
                    if name == "forward" or "composable" in name or name.startswith(("__", "_dist")):
                        del vars(module)[name]
                mapping.pop(module, None)


def accumulated_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return gradients that have accumulated on this rank and are not reduced yet.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["_unsharded_param"]``.
    Versions before 2.15 may have a gradient in another type than the weight beside it.
    Without it: `scale_loss` in a window of `accumulate` weighs micro-batches by the first one's count.
    """
    params = [param for _, state in _states(model) for group in _groups(state) for param in group.fsdp_params]
    found = [getattr(param, "unsharded_accumulated_grad", None) for param in params]
    found += [getattr(getattr(param, "_unsharded_param", None), "grad", None) for param in params]
    return list({id(grad): grad for grad in found if grad is not None}.values())  # 2.15 has one by both names


def _states(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    for module in model.modules():
        state = _state_of(module)
        if state is not None:
            yield module, state


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a state: one until torch 2.12, several since.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup``.
    """
    several = getattr(state, "_fsdp_param_groups", None)
    group = getattr(state, "_fsdp_param_group", None)
    return list(several) if several is not None else [] if group is None else [group]


# Modules, parameters and operators


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method by which a module draws its numbers, ``None`` where it has none.

    Relies on ``torch.nn:MultiheadAttention._reset_parameters``, as torch's attention calls what others show.
    Without it: a model without numbers must not hold torch's attention.
    """
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer of a module is in its state dict.

    Relies on ``torch.nn:Module()._non_persistent_buffers_set``.
    Without it: all of them are.
    """
    return buffer not in getattr(module, "_non_persistent_buffers_set", ())


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another.

    Relies on ``torch:Tensor._base``.
    Without it: a unit's output that is changed in place may lose gradients.
    """
    return getattr(tensor, "_base", None) is not None


def has_gradient_hook(parameter: torch.Tensor, *, after_accumulation: bool = True) -> bool:
    """Return whether a function was registered for when a parameter gets its gradient.

    Relies on ``torch:Tensor._backward_hooks``, ``torch:Tensor._post_accumulate_grad_hooks``.
    Without it: hooks from before a model was divided are lost in silence.

    Args:
        parameter: to look at.
        after_accumulation: whether hooks that see the accumulated gradient count.
    """
    hooks = getattr(parameter, "_backward_hooks", None)
    return bool(hooks or (after_accumulation and getattr(parameter, "_post_accumulate_grad_hooks", None)))


def products() -> set[Any]:
    """Return the operators that multiply matrices, of which attention is one.

    Relies on ``torch:ops.aten._scaled_dot_product_flash_attention``,
    ``torch:ops.aten._scaled_dot_product_flash_attention_for_cpu``,
    ``torch:ops.aten._scaled_dot_product_efficient_attention``.
    Without it: attention is computed again under ``checkpointing="selective"``.
    """
    aten: Any = torch.ops.aten
    attention = ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
    names = ["mm", "addmm", "bmm", "convolution", *(f"_scaled_dot_product_{kind}" for kind in attention)]
    return {getattr(aten, name).default for name in names if hasattr(aten, name)}


def shard_in_pieces(dimension: int, count: int) -> Any:
    """Return the placement of a tensor of `count` equal pieces, each of which is divided over the ranks by itself.

    Relies on ``torch.distributed.tensor.placement_types:_StridedShard``.
    Without it: layers of queries, keys and values in one weight cannot be cut.
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
    """Return a module's own table of parameters, to read and to change.

    Relies on ``torch.nn:Module()._parameters``.
    Without it: layers cannot be cut.
    """
    return module._parameters
