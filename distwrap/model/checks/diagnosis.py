"""Explanations of torch's errors about wrapped models in the user's words: names of parameters, not numbers."""

import re
import traceback

from torch import nn

from distwrap.errors import ModelError
from distwrap.group.world import World, current_world
from distwrap.model.checks.in_sync import Ledger
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels
from distwrap.network.waiting import wait_until
from distwrap.wording import first_names, named_ranks

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_MIXED = "got mixed torch.Tensor and DTensor"
_TWICE = "Expected to mark a variable ready only once"
_OTHERS_SECONDS = 0.5
_SHOWN = 12


def skipped(model: nn.Module, method: str) -> str:
    """Return the message that a backward has gone past the reducer, in which a method of the model may be running."""
    culprit = f": {method}() ran the bare {_name(model)}" if method else f" of {_name(model)}"
    return (
        f"rank {current_world().placement.rank}: this backward's gradients are not averaged with the other "
        f"ranks'{culprit}, so that every rank would train a model of its own (DW104). Call the model, or its method, "
        "through what wrap_model() returned, once for each backward; two losses of one forward belong into one "
        "backward: (a + b).backward(). A method that yields losses has ended before its forward: let it return them."
    )


def flipped(model: nn.Module) -> str:
    """Return the message that ``no_sync()`` covered a forward but not its backward."""
    return (
        f"rank {current_world().placement.rank}: the forward of {_name(model)} was in no_sync(), "
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
    if world.channel is None:
        return f"On rank {world.placement.rank}"
    ledger = Ledger(world, "unused")
    ledger.publish("", unused)
    wait_until(lambda: len(ledger.at("")) == len(ledger.others), _OTHERS_SECONDS)
    same = [rank for rank, theirs in ledger.at("").items() if theirs == unused]
    if len(same) == len(ledger.others):
        return "On every rank"
    words = named_ranks(sorted([world.placement.rank, *same]))
    return f"Only on {words}, so the ranks took different branches of the model"


def _by_module(names: list[str]) -> list[str]:
    """Group parameters by the module they belong to, as ``head: weight, bias``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        groups.setdefault(module or "the model itself", []).append(parameter)
    lines = [f"{module}: {', '.join(parameters)}" for module, parameters in groups.items()]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more modules"]


# What to do where a whole tensor met a divided one, by what the operator does.
_LOAD = "distwrap.load(path, into={'model': model, 'optimizer': optimizer})"
_LOADED = f"Load through what wrap_model() returned, model.load_state_dict(state), or by {_LOAD}."
_STEPPED = f"The state that this optimizer was given is whole. Load it by {_LOAD}."
_AVERAGED = "Wrap a second model, as an average of the weights, too, by wrap_model(): both are divided alike then."
_COMPUTED = (
    "In a loss, a norm or a mean of parameters take .full_tensor() of what is computed of each one, on every rank."
)
_CALLED = (
    "Call the model itself, or a method of it that calls one of its modules first, through what wrap_model() returned: "
    "what multiplies a weight with data belongs there, and a part of the model, as model.head or model.module, has no "
    "whole weights by itself."
)
_OF_LAYERS = re.compile(r"embedding|mm|addmm|bmm|baddbmm|linear|convolution|native_\w*norm|_scaled_dot\w*")


def _explained_mixture(error: RuntimeError) -> ModelError:
    found, calls = re.search(r"aten\.(\w+)\.\w+", str(error)), _calls_of(error)
    operator, name = found.group(0, 1) if found else ("an operator", "")
    if "load_state_dict" in calls:
        way_out = _LOADED
    elif "step" in calls:
        way_out = _STEPPED
    elif _OF_LAYERS.fullmatch(name) and "backward" not in calls:
        way_out = _CALLED
    else:
        way_out = _AVERAGED if name.endswith("_") else _COMPUTED
    return ModelError(
        f"rank {current_world().placement.rank}: {operator} was given a whole tensor together with a tensor of "
        "which this rank has only a part, which is what a parameter of a divided model is outside of its "
        f"forward. {way_out}"
    )


def _calls_of(error: BaseException) -> set[str]:
    """Return the names of torch's functions in which an error came."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return {each.f_code.co_name for each in frames if str(each.f_globals.get("__name__")).startswith("torch.")}


def _explained_twice(text: str) -> ModelError:
    found = re.search(r"Parameter at index (\d+)", text)
    index = int(found.group(1)) if found else -1
    watches = [gradients for _, gradients in current_world().part(WrappedModels).gradients()]
    candidates = {each.trained[index] for each in watches if 0 <= index < len(each.trained)}
    which = " or ".join(sorted(map(repr, candidates))) or "a parameter"
    return ModelError(
        f"rank {current_world().placement.rank}: the gradient of {which} was computed twice in one backward. "
        "One cause is reentrant activation checkpointing, which runs a part twice: use "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or, if every step uses the same "
        "parameters, wrap_model(..., static_graph=True). Another cause is a parameter that is used outside of "
        "the forward, or two forwards of a model with find_unused_parameters=True in one backward."
    )


def _name(model: nn.Module) -> str:
    return type(unwrap_model(model)).__name__
