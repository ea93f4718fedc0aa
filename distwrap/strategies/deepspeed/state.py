"""Get and load the full state, with plain keys, of a model and an optimizer in DeepSpeed's engine.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html (debugging: ``safe_get_full_fp32_param`` and others)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distwrap.errors import ModelError
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.wrapped_models import parameters_of


def full_weights(engine: Any, *, everywhere: bool) -> dict[str, Any]:
    """Return a model's state in the type of its master copy, on the CPU of rank 0 or all; every rank calls it."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine.take_over_weights()
    net = engine.net
    wanted = everywhere or dist.get_rank() == 0
    state: dict[str, Any] = net.state_dict()
    found: dict[int, torch.Tensor] = {}
    for parameter in net.parameters():
        whole = safe_get_full_fp32_param(parameter)
        if whole is None:
            whole = _gathered(parameter)
        found[id(parameter)] = whole.detach().cpu().clone() if wanted else torch.empty(0)
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = found[id(parameter)]
    return state


def load_weights(net: nn.Module, state: Mapping[str, Any], engine: Any) -> Any:
    """Load a whole state into a model, and into its engine's copies of the weights."""
    given = strip_module_prefix(dict(state), target=net)
    if engine is None:
        return net.load_state_dict(given)
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0, enabled=engine.stage == 3):
        found = net.load_state_dict(given)
        wholes = {id(parameter): parameter.detach().float().clone() for parameter in net.parameters()}
    for parameter in engine.parameters:
        whole = wholes[id(parameter)]
        if engine.stage < 3:
            safe_set_full_fp32_param(parameter, whole)
        else:
            _set_share(parameter, whole, None)
    engine.note_weights()
    return found


def full_optimizer_state(engine: Any, *, everywhere: bool) -> dict[str, Any]:
    """Return the state of the user's optimizer as in one process; every rank calls it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    wanted = everywhere or dist.get_rank() == 0
    numbers = {number: place for place, number in enumerate(parameters_of(engine.user))}
    found: dict[int, dict[str, Any]] = {}
    for parameter, kept in _kept(engine):
        own = found.setdefault(numbers[id(parameter)], {})
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim():
                whole = safe_get_full_optimizer_state(parameter, name)
                own[name] = whole.detach().cpu().clone() if wanted else torch.empty(0)
            else:
                own[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return {"state": found if wanted else {}, "param_groups": engine.user.state_dict()["param_groups"]}


def load_optimizer_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Load a whole state of the user's optimizer into its engine; every rank calls it with all of it.

    Raises:
        ModelError: the engine keeps its state on NVMe.
    """
    if engine.is_on_nvme and state["state"]:
        raise ModelError(
            f"the state of this {type(engine.user).__name__} cannot be loaded where DeepSpeed keeps it on NVMe, since "
            f"it has files only for what has stepped there. Use offload='cpu' or none, or load the model alone."
        )
    saved = [number for group in state["param_groups"] for number in group["params"]]
    held = parameters_of(engine.user)
    by_parameter = {each: state["state"].get(number, {}) for number, each in zip(saved, held, strict=True)}
    engine.user.load_state_dict({**state, "state": {}})
    _lay_out(engine, by_parameter)
    for parameter in engine.parameters:
        for name, value in by_parameter[id(parameter)].items():
            if isinstance(value, torch.Tensor) and value.shape == _shape(parameter):
                _set_optimizer_state(engine, parameter, value, name)


def _set_optimizer_state(engine: Any, parameter: nn.Parameter, value: torch.Tensor, name: str) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state

    if engine.stage < 3:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device).float(), name)
    else:
        _set_share(parameter, value, name)


def _set_share(parameter: Any, whole: torch.Tensor, name: str | None) -> None:
    """Set this rank's share of a weight, or of its optimizer state, under stage 3."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    size = parameter.ds_tensor.ds_numel
    row = whole.detach().float().flatten().to(parameter.ds_tensor.device)
    row = torch.nn.functional.pad(row, (0, size * dist.get_world_size() - row.numel()))
    share = row.narrow(0, size * dist.get_rank(), size)
    if name is None:
        safe_set_local_fp32_param(parameter, share)
    else:
        safe_set_local_optimizer_state(parameter, share, name)


def _lay_out(engine: Any, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Make space for a state in the engine's optimizer, if it has not stepped yet."""
    from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

    for flat, parameters in _rows(engine):
        pattern = next((states[id(each)] for each in parameters if states.get(id(each))), {})
        kept = engine.inner.state[flat]
        for name, value in pattern.items():
            if isinstance(value, torch.Tensor) and value.dim():
                kept.setdefault(name, torch.zeros_like(flat))
            else:
                kept[name] = value.clone() if isinstance(value, torch.Tensor) else value
        if not kept:
            engine.inner.state.pop(flat, None)
        elif engine.stage < 3:
            lazy_init_hp_params_optimizer_state(parameters, flat, engine.inner.state)


def _kept(engine: Any) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Yield each parameter with the optimizer state of the flat tensor that contains a part of it."""
    for flat, parameters in _rows(engine):
        kept = engine.inner.state.get(flat)
        if kept:
            for parameter in parameters:
                yield parameter, kept


def _rows(engine: Any) -> Iterator[tuple[torch.Tensor, list[nn.Parameter]]]:
    """Yield each flat tensor that the engine's optimizer steps on this rank, and the parameters in it."""
    zero = engine.deepspeed.optimizer
    flats = zero.single_partition_of_fp32_groups if engine.stage < 3 else zero.fp32_partitioned_groups_flat
    yield from zip(flats, zero.bit16_groups if engine.stage < 3 else zero.fp16_groups, strict=True)


def _gathered(parameter: nn.Parameter) -> torch.Tensor:
    """Return the whole of a parameter that no optimizer steps."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
