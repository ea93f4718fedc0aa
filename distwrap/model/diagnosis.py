"""Explanations of torch's errors about wrapped models in the user's words: names of parameters, not numbers."""

import ast
import inspect
import json
import re
import textwrap
import time
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from distwrap.errors import ModelError
from distwrap.group.world import World, current_world
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels
from distwrap.supervision.stacks import users_frame
from distwrap.wording import first_names, named_ranks

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_MIXED = "got mixed torch.Tensor and DTensor"
_TWICE = "Expected to mark a variable ready only once"
_OTHERS_SECONDS = 0.5
_SHOWN = 12


def skipped(model: nn.Module, method: str) -> str:
    """Return the message that a backward has gone past the reducer, with the user's call that led to it."""
    calls = [f"{method}()"] if method else _calls_past(model)
    name = type(unwrap_model(model)).__name__
    culprit = f": {', '.join(calls)} ran the bare {name}" if calls else f" of {name}"
    place = current_world().placement
    return (
        f"rank {place.rank}: this backward's gradients are not averaged with the other ranks'{culprit}, so that every "
        f"rank would train a model of its own (DW104). Call the model, or its method, through what "
        f"wrap_model() returned, once for each backward; two losses of one forward belong into one backward: "
        f"(a + b).backward()."
    )


def flipped(model: nn.Module) -> str:
    """Return the message that ``no_sync()`` covered a forward but not its backward."""
    return (
        f"rank {current_world().placement.rank}: the forward of {type(unwrap_model(model)).__name__} was in no_sync(), "
        f"but its backward is not. DDP decides in the forward, so these gradients are not averaged (DW104). Put both "
        f"inside, or loop over distwrap.accumulate(loader, steps, model)."
    )


def explained(error: RuntimeError) -> RuntimeError:
    """Return the explanation of torch's error in a backward, or of a divided tensor; any other error as it is."""
    if _MIXED in str(error):
        return _because(error, _explained_mixture(error))
    return _because(error, _explained_twice(str(error))) if _TWICE in str(error) else error


def unfinished(error: RuntimeError, model: nn.Module, trained: list[str]) -> RuntimeError:
    """Return the explanation of an error of DDP's in a forward, with parameters and ranks; any other error as it is."""
    if _UNFINISHED not in str(error):
        return error
    found = re.search(r"did not receive grad for rank \d+: ((?:\d+ ?)+)", str(error))
    unused = [trained[int(index)] for index in found.group(1).split()] if found else []
    now_frozen = [name for name, value in model.named_parameters() if name in unused and not value.requires_grad]
    world = current_world()
    lines = [f"rank {world.placement.rank}: in its last step some parameters had no gradient, and DDP waits for them."]
    if unused:
        lines.append(f"{_whose(world, unused)}:")
        lines += [f"  {line}" for line in _by_module(unused)]
    if now_frozen:
        lines.append(
            f"Of these, {first_names(now_frozen)} were frozen after wrap_model(). Freeze before it, or wrap again: "
            f"model = wrap_model(unwrap_model(model))."
        )
    else:
        lines.append(
            "Use them in every step, freeze them before wrap_model() with requires_grad_(False), or, where the model "
            "really takes one way or the other, wrap_model(..., find_unused_parameters=True). Every output of the "
            "forward must also be part of the loss. If the loop has caught an error of the backward before, that is "
            "why: its exchange is not finished. Let such an error end the run, or check the batch before its forward."
        )
    return _because(error, ModelError("\n".join(lines)))


def _because(cause: RuntimeError, error: ModelError) -> ModelError:
    error.__cause__ = cause
    return error


def _whose(world: World, unused: list[str]) -> str:
    """Return which ranks have left these parameters out, as far as they have reported within a moment."""
    me, everybody = world.placement.rank, range(world.placement.world_size)
    if world.channel is None:
        return f"On rank {me}"
    world.channel.note("unused", json.dumps(unused))
    deadline, same = time.monotonic() + _OTHERS_SECONDS, [me]
    while time.monotonic() < deadline and len(same) < len(everybody):
        time.sleep(0.02)
        same = [rank for rank in everybody if json.loads(world.channel.noted("unused", rank) or "[]") == unused]
    if len(same) == len(everybody):
        return "On every rank"
    return f"Only on {named_ranks(same)}, so the ranks took different branches of the model"


def _by_module(names: list[str]) -> list[str]:
    """Group parameters by the module they belong to, as ``head: weight, bias``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        groups.setdefault(module or "the model itself", []).append(parameter)
    lines = [f"{module}: {', '.join(parameters)}" for module, parameters in groups.items()]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more modules"]


# What to do where a whole tensor met a divided one, by what the operator does.
_LOADED = "Load through what wrap_model() returned, model.load_state_dict(state), or by {load}."
_STEPPED = "The state that this optimizer was given is whole. Load it by {load}."
_AVERAGED = "Wrap a second model, as an average of the weights, too, by wrap_model(): both are divided alike then."
_COMPUTED = (
    "In a loss, a norm or a mean of parameters take .full_tensor() of what is computed of each one, on every rank."
)
_CALLED = (
    "Call the model itself, or a method of it that calls one of its modules first, through what wrap_model() returned: "
    "what multiplies a weight with data belongs there, and a part of the model, as model.head or model.module, has no "
    "whole weights by itself."
)
_LOAD = "distwrap.load(path, into={'model': model, 'optimizer': optimizer})"
_OF_LAYERS = re.compile(r"aten\.(embedding|mm|addmm|bmm|baddbmm|linear|convolution|native_\w*norm|_scaled_dot\w*)\.")


def _explained_mixture(error: RuntimeError) -> ModelError:
    found = re.search(r"aten\.\w+\.\w+", str(error))
    operator = found.group() if found else "an operator"
    if "load_state_dict" in (calls := _calls_of(error)):
        way_out = _LOADED
    elif "step" in calls:
        way_out = _STEPPED
    elif _OF_LAYERS.match(operator) and "backward" not in calls:
        way_out = _CALLED
    else:
        way_out = _AVERAGED if operator.partition(".")[2].partition(".")[0].endswith("_") else _COMPUTED
    return ModelError(
        f"rank {current_world().placement.rank}: {operator} was given a whole tensor together with a tensor of "
        "which this rank has only a part, which is what a parameter of a divided model is outside of its "
        f"forward. {way_out.format(load=_LOAD)}"
    )


def _calls_of(error: BaseException) -> set[str]:
    """Return the names of torch's functions in which an error came."""
    found, trace = set(), error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if str(frame.f_globals.get("__name__")).startswith("torch."):
            found.add(frame.f_code.co_name)
        trace = trace.tb_next
    return found


def _explained_twice(text: str) -> ModelError:
    found = re.search(r"Parameter at index (\d+)", text)
    candidates = {
        gradients.trained[int(found.group(1))]
        for _, gradients in current_world().part(WrappedModels).gradients()
        if found and int(found.group(1)) < len(gradients.trained)
    }
    which = " or ".join(sorted(map(repr, candidates))) or "a parameter"
    return ModelError(
        f"rank {current_world().placement.rank}: the gradient of {which} was computed twice in one backward. "
        "One cause is reentrant activation checkpointing, which runs a part twice: use "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or, if every step uses the same "
        "parameters, wrap_model(..., static_graph=True). Another cause is a parameter that is used outside of "
        "the forward, or two forwards of a model with find_unused_parameters=True in one backward."
    )


def _calls_past(model: nn.Module) -> list[str]:
    """Find the calls of the bare model in the function that calls ``backward``: its forwards leave no other trace.

    Looks at names and attributes only, and finds nothing where the call was made elsewhere.
    """
    frame = users_frame()
    if frame is None:
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(frame.f_code)))
    except (OSError, SyntaxError, TypeError):
        return []
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = [ast.unparse(called) for called in calls if _is_past(called, frame, model)]
    return [f"{text}()" for text in dict.fromkeys(found)]


def _is_past(called: ast.expr, frame: FrameType, model: nn.Module) -> bool:
    """Return whether an expression as ``net.loss`` or ``model.module`` is of the bare model or a part of it."""
    net = unwrap_model(model)
    parts = {id(part) for part in net.modules()}
    value = _value(called, frame)
    if value is None or value is model:
        return False
    if isinstance(value, nn.Module):
        return id(value) in parts
    owner = getattr(value, "__self__", None)
    forward_like = value.__name__ not in vars(nn.Module) if hasattr(value, "__name__") else False
    return owner is not None and id(owner) in parts and forward_like


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """Evaluate a name, or attributes of one, without running anything but attribute access on modules."""
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        owner = _value(expression.value, frame)
        return getattr(owner, expression.attr, None) if isinstance(owner, (nn.Module, ModuleType)) else None
    if isinstance(expression, ast.Call) and _value(expression.func, frame) is unwrap_model and expression.args:
        wrapped = _value(expression.args[0], frame)
        return unwrap_model(wrapped) if isinstance(wrapped, nn.Module) else None
    return None
