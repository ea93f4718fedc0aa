"""Uses of divided parameters that torch would let pass, and that would be lost, or save a part: they work, or raise."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from distwrap.errors import ModelError
from distwrap.group.world import RunPart, World, current_world
from distwrap.strategies import shards

_READ = ("item", "tolist", "__float__", "__int__", "__bool__", "__format__")
_DRAW = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")
_SAVES_PARTS = ("torch.distributed.checkpoint", "distwrap.checkpoint")


class DividedTensors(RunPart):
    """Changes of ``DTensor`` for the time of one run.

    ``tensor.data = …`` acts, pickling one is an error, as is reading a sum of this rank's part alone, and what draws a
    weight's numbers draws those of one process.
    """

    def __init__(self, world: World) -> None:
        copyreg.pickle(DTensor, _reduced)
        self._changes = {
            "data": property(_data, _set_data),
            **{name: _reading(name) for name in _READ},
            **({name: _drawing(name) for name in _DRAW} if world.device.type == "cpu" else {}),
        }
        for name, change in self._changes.items():
            setattr(DTensor, name, change)

    def close(self) -> None:
        """Make it what it was."""
        copyreg.dispatch_table.pop(DTensor, None)
        for name, change in self._changes.items():
            if vars(DTensor).get(name) is change:
                delattr(DTensor, name)


def refuse_gradient_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Make ``register_hook`` of parameters an error: the exchange that gives them a gradient calls no such hook."""
    for parameter in parameters:
        parameter.__dict__["register_hook"] = _refuse_hook


def _refuse_hook(hook: Any) -> NoReturn:
    raise ModelError(
        "register_hook() of a divided parameter: such a hook is never called, since the gradient comes from an "
        "exchange. Use register_post_accumulate_grad_hook()."
    )


def _reading(name: str) -> Callable[..., Any]:
    """Return the method of a tensor that gives its numbers to the loop, for whole numbers alone."""
    method = getattr(torch.Tensor, name)

    def read(tensor: DTensor, *args: Any) -> Any:
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if any(ranks > 1 and not placement.is_replicate() for placement, ranks in sizes):
            raise ModelError(
                f"rank {current_world().placement.rank}: the loop reads numbers of a divided tensor, or a sum, norm or "
                f"mean of one, of which this rank has a part. Take tensor.full_tensor() of it first, on every rank, as "
                f"in weight.norm().full_tensor().item()."
            )
        return method(tensor.full_tensor() if name == "__format__" else tensor, *args)

    return read


def _drawing(name: str) -> Callable[..., DTensor]:
    """Return the method that draws a tensor's numbers: all of them on each rank, which keeps its own.

    On the CPU torch would draw each rank's own of the same sequence, so that all have equal ones.
    """

    def draw(tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            shards.fill(tensor, getattr(whole, name)(*args, **kwargs))
        return tensor

    return draw


def _data(tensor: DTensor) -> Any:
    return torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def _set_data(tensor: DTensor, value: Any) -> None:
    """Copy the numbers, which torch would leave alone: a ``DTensor`` keeps them in a tensor of its own.

    Raises:
        ModelError: they are of another size or type.
    """
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        given = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(
            f"parameter.data = …: a divided parameter of {tuple(tensor.shape)}, {tensor.dtype}, cannot become one of "
            f"{given}. Give it a tensor of its own size and type."
        )
    with torch.no_grad():
        if isinstance(value, DTensor) and value.placements != tensor.placements:
            value = value.redistribute(placements=tensor.placements)
        shards.fill(tensor, value)


def _reduced(tensor: DTensor) -> Any:
    """Return what a pickle holds of a tensor, where all parts of it are saved or sent.

    Raises:
        ModelError: a part of it would pass for the whole.
    """
    callers = _callers()
    by = next(callers)
    is_torchs = by.startswith(("torch.", "multiprocessing")) and by != "torch.serialization"
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    if not (is_whole or is_torchs or any(caller.startswith(_SAVES_PARTS) for caller in callers)):
        raise ModelError(
            f"rank {current_world().placement.rank} has a part of a tensor of {tuple(tensor.shape)}, and would save or "
            f"send that in the place of the whole. distwrap.save({{'model': model, 'optimizer': optimizer}}, path), "
            f"called on every rank, writes all of it; tensor.full_tensor(), called on every rank, returns the whole."
        )
    return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _callers() -> Iterator[str]:
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back  # who pickles
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back
    yield ""
