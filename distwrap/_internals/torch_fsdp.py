"""Private names of torch for FSDP2's gathered weights: hooks on gather and reduce, restoring shards, a reset.

Every method says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distwrap._internals.torch import after_backward, version_of
from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_sharding import _groups, _state_of, _states, fsdp_groups, has_unreduced, own_parameters
from distwrap.versions import ACCUMULATES_BESIDE_PARAMETERS


class GatheredUnits:
    """Units of a model that FSDP2 has divided, each of which gathers its weights and reduces its gradients.

    Outside of a forward and its backward, modules hold the shards, so that code which changes, freezes or collects
    parameters sees these. The whole weights of some units stay in memory until the backward.

    Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.unshard``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.is_unsharded``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._to_sharded``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._init_mp_dtypes``,
    ``torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState.PRE_BACKWARD``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._setattr_on_modules``.
    Without it: a divided model cannot be wrapped.

    Args:
        model: the divided model.
        on_exchange: called before each exchange with the number of the unit, and a bit mask of its parameters with
            gradients to average, or -1 if its weights are gathered.
        on_gather: called with the number of a unit before its whole weights replace the shards.
        on_graph: called before a backward through a unit that itself needs a backward.

    Attributes:
        names: the names of each unit's parameters in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        on_exchange: Callable[[int, int], object],
        on_gather: Callable[[int], object],
        on_graph: Callable[[], object],
    ) -> None:
        self._model, self._on_exchange, self._on_gather, self._on_graph = model, on_exchange, on_gather, on_graph
        self._units, self._hidden = fsdp_groups(model), set[int]()
        self._params = [param for unit in self._units for param in unit.fsdp_params]
        self._left = list[tuple[Any, Any, int]]()
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names = [[known.get(id(param.sharded_param), "") for param in unit.fsdp_params] for unit in self._units]
        for number, unit in enumerate(self._units):
            unit.unshard = partial(self._gather, number, unit, unit.unshard)
            unit.post_backward = partial(self._reduce, number, unit, unit.post_backward)

    @property
    def average(self) -> bool:
        """Whether a backward averages gradients, instead of accumulating them on each rank."""
        return any(unit.reduce_grads for unit in self._units)

    def begin(self) -> bool:
        """Let a forward gather the current shards, and return whether the last backward was broken off."""
        is_broken = self.is_broken()
        if is_broken:
            self.start_afresh()
            for param in self._params:
                _drop_gradients(param)
        self.has_left_window()
        for unit in self._units:
            if unit.is_unsharded:
                unit._to_sharded()
            if getattr(unit, "_orig_dtype", 0) is None:  # the whole unit was frozen when its types were chosen
                unit._init_mp_dtypes()
        self._hidden.clear()
        return is_broken

    def end(self) -> None:
        """Put the shards back on the modules after a forward, and free what no backward needs."""
        keep = torch.is_grad_enabled()
        for number, unit in enumerate(self._units):
            if unit.is_unsharded and keep:
                self._hidden.add(number)
                for param in unit.fsdp_params:
                    param._setattr_on_modules(param.sharded_param)
            elif unit.is_unsharded:
                unit._to_sharded()

    def has_left_window(self) -> bool:
        """Return whether gradients of a left window still exist; drop those that the loop has zeroed."""
        self._left = [each for each in self._left if _is_kept(*each)]
        return bool(self._left)

    def leave_window(self) -> None:
        """Drop gradients accumulated on this rank alone as soon as the loop zeroes those of the shards.

        Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__annotations__["_unsharded_param"]``.
        Without it: gradients of a left window are added to those of the next step.
        """
        for param in self._params:
            if has_unreduced(param):
                shard = param.sharded_param
                if shard.grad is None:
                    shard.grad = torch.zeros_like(shard)
                self._left.append((param, shard.grad, version_of(shard.grad)))

    def replaced(self, number: int) -> str:
        """Return the name of a unit's parameter whose module has another tensor instead, or an empty string.

        Relies on ``torch.distributed.fsdp._fully_shard._fsdp_param:ParamModuleInfo``.
        Without it: a replaced parameter is silently ignored.
        """
        for name, param in zip(self.names[number], self._units[number].fsdp_params, strict=True):
            info = getattr(param, "_module_info", None)
            if info is not None and own_parameters(info.module).get(info.param_name) is not param.sharded_param:
                return name
        return ""

    def is_broken(self) -> bool:
        """Return whether an exception ended the last backward.

        Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState()._state_ctx``.
        Without it: weights stay gathered after a failed backward.
        """
        context = getattr(_state_of(self._model), "_state_ctx", None)
        return getattr(context, "post_backward_final_callback_queued", False) and not in_backward()

    def start_afresh(self) -> None:
        """Reset FSDP for the next forward after an exception in a forward or backward.

        Gradients of earlier backwards stay, as in one process; torch 2.15's own reset drops them.

        Relies on ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState()._training_state``,
        ``torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState()._state_ctx``.
        Without it: a loop that goes on after an exception in a forward gets wrong gradients in the next one.
        """
        reset = getattr(self._model, "reset_iter_state", None)
        if reset is not None:
            kept = [(tensor, tensor.grad) for param in self._params for tensor in _holders(param)]
            reset()
            for tensor, grad in kept:
                if grad is not None and tensor.grad is None:
                    tensor.grad = grad.to(getattr(tensor, "grad_dtype", None) or grad.dtype)
            return
        for _, state in _states(self._model):  # until torch 2.12
            state._training_state = type(state._training_state).IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            state._comm_ctx.post_forward_order.clear()
            getattr(state, "_modules_to_run_forward", set()).clear()
            for group in _groups(state):
                group._training_state = type(group._training_state).IDLE
                group._post_forward_indices.clear()
                group.wait_for_unshard()
                group._to_sharded()

    def _gather(self, number: int, unit: Any, unshard: Callable[[bool], None], async_op: bool = False) -> None:
        if torch.is_grad_enabled() and unit._training_state.name == "PRE_BACKWARD":
            self._on_graph()
        if unit.is_unsharded:
            if number in self._hidden:
                self._on_gather(number)
                self._hidden.remove(number)
                for param in unit.fsdp_params:
                    param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
                    param._setattr_on_modules(param._unsharded_param)
            return
        if unit._all_gather_result is None:
            self._on_gather(number)
            self._on_exchange(number, -1)
        if not torch.is_inference_mode_enabled():
            unshard(async_op)
            return
        with torch.inference_mode(False), torch.no_grad():  # a later backward needs these tensors
            unshard(async_op)
            unit.wait_for_unshard()

    def _reduce(self, number: int, unit: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        if unit.reduce_grads:
            as_zeros, having = getattr(unit, "reduce_scatter_unused_params", False), 0
            for place, param in enumerate(unit.fsdp_params):
                own = getattr(param, "_unsharded_param", None)
                if has_unreduced(param) or (as_zeros and own is not None and own.requires_grad):
                    having |= 1 << place
            if having:
                self._on_exchange(number, having)
                if as_zeros:
                    _ask_whose_are_used(unit)
        post_backward(*unused)


def _ask_whose_are_used(unit: Any) -> None:
    """Set the gradient of parameters that no rank has used to ``None``, as in one process; FSDP sets zeros."""
    used = torch.tensor([float(has_unreduced(param)) for param in unit.fsdp_params], device=unit.device)
    without = [(place, param.sharded_param) for place, param in enumerate(unit.fsdp_params)]
    without = [(place, shard) for place, shard in without if shard.grad is None]
    work: Any = dist.all_reduce(used, op=dist.ReduceOp.MAX, async_op=True)

    def leave_out() -> None:
        work.wait()
        by_any = used.tolist()
        for place, shard in without:
            if not by_any[place]:
                shard.grad = None

    after_backward(leave_out)


def _holders(param: Any) -> list[torch.Tensor]:
    """Return the shard and the whole tensor of an FSDP parameter, each of which may have a gradient."""
    return [tensor for tensor in (param.sharded_param, getattr(param, "_unsharded_param", None)) if tensor is not None]


def _drop_gradients(param: Any) -> None:
    if ACCUMULATES_BESIDE_PARAMETERS:
        param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def _is_kept(param: Any, grad: Any, version: int) -> bool:
    """Return whether a shard's gradient is unchanged; if not, drop the gradient accumulated beside it."""
    if param.sharded_param.grad is not grad or version_of(grad) != version:
        _drop_gradients(param)
    return has_unreduced(param)
