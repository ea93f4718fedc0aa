"""Changes of a part of a divided tensor, as ``weight[:3].zero_()`` and ``weight.grad[mask] = 0``.

If torch has to put the part together from several ranks, it is a copy, in which a change would be lost. Here the change
is also made in the whole tensor, as in one process; every rank must make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from distwrap._internals.torch_sharding import is_in_pieces, is_view
from distwrap.nesting import rebuilt
from distwrap.strategies import shards

# Methods that return a view of a plain tensor.
_VIEWS = (
    *("__getitem__", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "diagonal"),
    *("view", "view_as", "reshape", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as"),
    *("transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "detach"),
)
_NOT_IN_PLACE = {"requires_grad_", "retain_grad_", "rename_", "share_memory_", "is_shared_", "detach_", "resize_"}


@dataclass(frozen=True)
class _PartOf:
    """Position of a copied part in its tensor.

    Attributes:
        source: the divided tensor.
        view: returns this part of a tensor of the same shape.
    """

    source: DTensor
    view: Callable[[torch.Tensor], torch.Tensor]


_parts: MutableMapping[torch.Tensor, _PartOf] = WeakIdKeyDictionary()


def changes(already: dict[str, Any]) -> dict[str, Any]:
    """Return methods for ``DTensor`` that apply changes of parts to the whole tensor.

    Args:
        already: other replaced methods, which are called too.
    """
    found: dict[str, Any] = {name: _viewing(getattr(torch.Tensor, name)) for name in _VIEWS}
    for name in _in_place():
        found[name] = _changing(already.get(name) or getattr(torch.Tensor, name))
    found["__setitem__"] = _set_item
    return found


def same_part(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Note that a tensor, such as ``.data``, has the numbers of another one, which may be a part."""
    if other in _parts:
        _parts[tensor] = _parts[other]


def _in_place() -> Iterator[str]:
    for name in dir(torch.Tensor):
        by_operator = name.startswith("__i") and name.endswith("__") and hasattr(torch.Tensor, f"__{name[3:]}")
        by_name = name.endswith("_") and not name.startswith("_") and name not in _NOT_IN_PLACE
        if (by_name or by_operator) and callable(getattr(torch.Tensor, name)):
            yield name


def _viewing(method: Callable[..., Any]) -> Callable[..., Any]:
    def viewed(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and tensor.requires_grad):  # as in a loss
            return method(tensor, *args, **kwargs)
        if method is not torch.Tensor.detach and _is_uneven(tensor):
            result = method(shards.whole(tensor), *args, **kwargs)
            result = rebuilt(result, lambda leaf, _: _on_all_ranks(tensor, leaf))
        else:
            result = method(tensor, *args, **kwargs)
        many = isinstance(result, (tuple, list))
        for number, part in enumerate(result if many else [result]):
            if _is_copy(part, tensor) and _would_be_view(method, tensor, args, kwargs, number if many else None):

                def view(whole: torch.Tensor, number: int = number) -> Any:
                    found = method(whole, *args, **kwargs)
                    return found[number] if many else found

                _parts[part] = _PartOf(tensor, view)
        return result

    return viewed


def _is_uneven(tensor: DTensor) -> bool:
    """Return whether ranks have parts of different sizes or in pieces, of which torch makes no reshaped views."""
    pairs = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(
        is_in_pieces(placement) or (isinstance(placement, Shard) and tensor.shape[placement.dim] % ranks > 0)
        for placement, ranks in pairs
    )


def _on_all_ranks(pattern: DTensor, leaf: Any) -> Any:
    return shards.on_all_ranks(pattern, leaf) if isinstance(leaf, torch.Tensor) else leaf


def _is_copy(part: Any, tensor: DTensor) -> bool:
    """Return whether a part has its own numbers on this rank."""
    if not isinstance(part, DTensor) or part is tensor:
        return False
    own, its = shards.local(part), shards.local(tensor)
    return tensor in _parts or own.untyped_storage().data_ptr() != its.untyped_storage().data_ptr()


def _would_be_view(method: Callable[..., Any], tensor: DTensor, args: Any, kwargs: Any, number: int | None) -> bool:
    """Return whether one process would have a view, so that changing it changes the tensor."""
    positional, named = rebuilt([list(args), kwargs], lambda leaf, _: _on_meta(leaf))
    try:
        result = method(_on_meta(tensor), *positional, **named)
    except Exception:  # noqa: BLE001 - as by a mask, which makes no view
        return False
    return is_view(result if number is None else result[number])


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _changing(method: Callable[..., Any]) -> Callable[..., Any]:
    def changed(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        result = method(tensor, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _write_back(tensor)
        return result

    return changed


def _write_back(part: DTensor) -> None:
    """Copy the numbers of a part into its tensor; every rank calls it."""
    known = _parts.get(part)
    if known is None:
        return
    with torch.no_grad():
        whole = shards.whole(known.source).clone()
        known.view(whole).copy_(shards.whole(part))
        shards.fill(known.source, whole)
    _write_back(known.source)


def _set_item(tensor: DTensor, index: Any, value: Any) -> None:
    """Set some numbers of a divided tensor, as ``weight.data[mask] = 0`` does; every rank calls it."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        torch.Tensor.__setitem__(tensor, index, value)
        return
    with torch.no_grad():
        whole = shards.whole(tensor).clone()
        given = rebuilt([index, value], lambda leaf, _: shards.whole(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        whole[given[0]] = given[1]
        shards.fill(tensor, whole)
    _write_back(tensor)
