"""Make uses of divided parameters work or raise where torch would silently lose a change, or save a part."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from distwrap._internals.torch_sharding import handle_draws, part_from_storage
from distwrap.errors import CollectiveError, ModelError
from distwrap.group.world import RunPart, World, current_world
from distwrap.strategies import divided_changes, shards
from distwrap.strategies.alignment import Alignment

_NUMBERS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")
_DRAW = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")
_SAVES_PARTS = ("torch.distributed.checkpoint", "distwrap.checkpoint")
_given_out: MutableMapping[DTensor, list[ref[DTensor]]] = WeakIdKeyDictionary()  # results of ``tensor.data``


class DividedTensors(RunPart):
    """Changes of ``DTensor`` during one run.

    ``tensor.data = …`` and changes of parts have an effect, and pickling a part is an error. ``tensor.item()``, as of a
    weight's norm, returns the number of the whole tensor, and not of this rank's part. Functions that initialise a
    weight draw the numbers of one process.
    """

    def __init__(self, world: World) -> None:
        self.numbers = _Numbers("divided tensors")
        if not _runs:
            _change(on_cpu=world.device.type == "cpu")
        _runs.append(self)

    def close(self) -> None:
        """Restore ``DTensor`` at the end of the last run: simulated ranks share the class."""
        _runs.remove(self)
        while not _runs and _undo:
            _undo.pop()()


_runs: list[DividedTensors] = []
_undo: list[Callable[[], object]] = []


def _change(*, on_cpu: bool) -> None:
    copyreg.pickle(DTensor, _reduced)
    _undo.append(lambda: copyreg.dispatch_table.pop(DTensor, None))
    if on_cpu:
        _undo.append(handle_draws(_drawn_like))
    changes = {
        "data": property(_data, _set_data),
        "__format__": _formatted,
        **{name: _of_whole(getattr(torch.Tensor, name)) for name in _NUMBERS},
        **divided_changes.changes({name: _drawing(name) for name in _DRAW} if on_cpu else {}),
    }
    for name, change in changes.items():
        setattr(DTensor, name, change)
        _undo.append(partial(_restore, name, change))


def _restore(name: str, change: Any) -> None:
    if vars(DTensor).get(name) is change:
        delattr(DTensor, name)


def _of_whole(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for ``DTensor`` that returns numbers of the whole tensor."""

    def number(tensor: DTensor, *args: Any) -> Any:
        if not all(placement.is_replicate() for placement in tensor.placements):
            current_world().part(DividedTensors).numbers.meet()
        return method(shards.whole(tensor), *args)

    return number


class _Numbers(Alignment):
    """Reads of Python numbers from divided tensors, in which all ranks take part."""

    def meet(self) -> None:
        """Wait for the other ranks to take the same number."""
        self.count += 1
        self._meet()

    def _refuse(self, other: int, what: str) -> NoReturn:
        raise CollectiveError(
            f"rank {current_world().placement.rank} takes a number of divided tensors, as "
            f"weight.norm().item(), of which each rank has a part, and rank {other} {what}. Take that number "
            "on every rank, and print it on one."
        )


def _formatted(tensor: DTensor, words: str) -> str:
    """Format a number as torch does for a plain tensor, and other tensors by default."""
    return format(tensor.item(), words) if tensor.dim() == 0 else object.__format__(tensor, words)


def refuse_gradient_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Make ``register_hook`` of parameters an error, since a gradient from an exchange calls no such hook."""
    for parameter in parameters:
        parameter.__dict__["register_hook"] = _refuse_hook


def _refuse_hook(hook: Any) -> NoReturn:
    raise ModelError(
        "register_hook() of a divided parameter: such a hook would never be called, since the gradient comes "
        "from an exchange. Use register_post_accumulate_grad_hook()."
    )


def _drawing(name: str) -> Callable[..., DTensor]:
    """Return a method that draws a tensor's numbers: each rank draws all of them, and keeps its own.

    On the CPU, torch would let each rank draw from the same sequence, so that all parts are equal.
    """

    def draw(tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            shards.fill(tensor, getattr(whole, name)(*args, **kwargs))
        return tensor

    return draw


def _drawn_like(draw: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Draw numbers like a divided tensor, as ``torch.randn_like`` does, in the way of `_drawing`."""
    pattern, *others = args
    if "_like" in str(draw):  # uses only the size
        whole = torch.empty(pattern.shape, dtype=pattern.dtype, device=pattern.device)
    else:
        whole = shards.whole(pattern)
    return shards.divided_like(pattern, draw(whole, *others, **kwargs))


def _data(tensor: DTensor) -> Any:
    data = torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
    divided_changes.same_part(data, tensor)
    known = _given_out.get(tensor, [])
    _given_out[tensor] = [*(held for held in known if held() is not None), ref(data)]
    return data


def _set_data(tensor: DTensor, value: Any) -> None:
    """Copy the numbers of a value, since a ``DTensor`` keeps them in another tensor, which torch would not change.

    Earlier results of ``tensor.data`` keep their numbers, as when weights are swapped for their average.

    Raises:
        ModelError: the value has another size or type.
    """
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        given = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(
            f"parameter.data = …: a divided parameter of {tuple(tensor.shape)}, {tensor.dtype}, cannot become one of "
            f"{given}. Give it a tensor of its own size and type."
        )
    with torch.no_grad():
        for held in _given_out.pop(tensor, ()):
            if (before := held()) is not None and before is not value:
                part_from_storage(before)
        if isinstance(value, DTensor) and value.placements != tensor.placements:
            value = value.redistribute(placements=tensor.placements)
        shards.fill(tensor, value)


def _reduced(tensor: DTensor) -> Any:
    """Return the pickled form of a tensor, if all its parts are saved or sent.

    Raises:
        ModelError: a part would be saved or sent as the whole.
    """
    callers = _callers()
    by = next(callers)
    is_torchs = by.startswith(("torch.", "multiprocessing")) and by != "torch.serialization"
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    if not (is_whole or is_torchs or any(caller.startswith(_SAVES_PARTS) for caller in callers)):
        raise ModelError(
            f"rank {current_world().placement.rank} has a part of a tensor of {tuple(tensor.shape)}, and would "
            f"save or send that part in place of the whole. distwrap.save({{'model': model, 'optimizer': "
            f"optimizer}}, path), called on every rank, writes all of it; tensor.full_tensor(), called on "
            "every rank, returns the whole."
        )
    return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _callers() -> Iterator[str]:
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back  # the function that pickles
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back
    yield ""
