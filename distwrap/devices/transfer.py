"""Copies of tensors, in any nesting, on a device, and of a loader's batches a step ahead."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from distwrap._internals.torch_autograd import hooks_kept
from distwrap._internals.torch_tree import map_tensors
from distwrap.devices.kinds import SideStream, kind_of
from distwrap.errors import ModelError
from distwrap.live_objects import instances


def to_device(
    value: Any, device: torch.device, objects: Literal["copied", "changed", "left"] = "copied", *, waits: bool = True
) -> Any:
    """Move the tensors in any nesting to a device, and objects that can be moved; costs nothing on the CPU.

    Args:
        value: tensors, in any nesting. What has a ``to()`` moves itself, as a ``PackedSequence`` does.
        device: where to.
        objects: what becomes of other objects with tensors, as for `map_tensors`.
        waits: until what was in pinned memory is copied, which its owner may fill anew then.
    """
    if device.type == "cpu":
        return value

    def moved(part: Any) -> Any:
        try:
            found = part.to(device, non_blocking=not waits)
        except TypeError:
            if isinstance(part, torch.Tensor):
                raise
            found = part.to(device)
        return part if found is None else found  # where it has moved in place

    return map_tensors(moved, value, also=lambda part: callable(getattr(type(part), "to", None)), objects=objects)


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, and return it; its parameters stay the objects that an optimizer may hold.

    torch exchanges them for others where the device's tensors are of another kind, unless it may swap their contents.
    What optimizers have of them goes along.

    Raises:
        ModelError: their contents cannot be swapped; names one.

    Source: https://docs.pytorch.org/docs/stable/future_mod.html
    """
    if all(tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
        return model  # to swap its tensors for themselves would take their hooks away
    moved = model.to(device) if _takes_data(device) else _swapped(model, device)
    let_states_follow(moved)
    return moved


def let_states_follow(model: nn.Module) -> None:
    """Move what optimizers hold of a model's parameters, as momenta, to where these are."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for optimizer in instances(Optimizer):
        on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
        for parameter, state in optimizer.state.items():
            for name, value in state.items() if id(parameter) in parameters else ():
                stays = name == "step" and not on_device  # which torch counts on the CPU
                if isinstance(value, torch.Tensor) and value.device != parameter.device and not stays:
                    state[name] = value.to(parameter.device)


def _swapped(model: nn.Module, device: torch.device) -> nn.Module:
    before = torch.__future__.get_swap_module_params_on_conversion()
    kept = [(parameter, type(parameter), dict(vars(parameter))) for parameter in model.parameters()]
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"{name} has no shape yet: let the model run once, on the CPU, before wrap_model().")
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with hooks_kept(model.parameters()):
            moved = model.to(device)
    except RuntimeError as error:
        raise ModelError(
            f"{type(model).__name__} cannot be moved to {device}: {error}. Something else holds a weak "
            "reference to one of its parameters, or the graph of an earlier forward is still there. Move the "
            f"model by model.to({str(device)!r}) when it is made, and make its optimizer then."
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for parameter, kind, attributes in kept:  # torch has swapped them too
        parameter.__class__ = kind
        vars(parameter).update(attributes)
    return moved


def _takes_data(device: torch.device) -> bool:
    """Return whether a tensor of the CPU can become one of a device."""
    if device.type in ("cpu", "meta"):
        return True
    try:
        torch.empty(0).data = torch.empty(0, device=device)
    except RuntimeError:
        return False
    return True


def on_device(batches: Iterable[Any], device: torch.device, ahead: bool, pinned: bool = False) -> Iterator[Any]:
    """Yield the batches on a device.

    Args:
        batches: from a loader.
        device: where the step computes.
        ahead: copy each batch while the step before still computes, on a stream of its own. That overlaps where
            the batch is in pinned memory (``pin_memory=True``).
        pinned: whether each batch is in pinned memory of its own, which nobody fills anew while it is copied.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
    """
    if not ahead or kind_of(device).streams() is None:
        for batch in batches:
            yield to_device(batch, device, waits=not pinned)
        return
    side, copied = SideStream(device), deque[tuple[Any, Any]]()

    def first() -> Any:
        batch, moment = copied.popleft()
        side.wait(moment)  # of its own copy: the next one waits for the step before this
        return batch

    for batch in batches:
        until_now = side.moment()  # which may read what was in memory that is free by now
        with side.current():
            side.wait(until_now)
            copied.append((to_device(batch, device, waits=not pinned), side.moment()))
        if len(copied) > 1:
            yield first()
    if copied:
        yield first()
