"""Gather: every rank's tensors, one after the other, on every rank, with their gradients."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, overload

import torch

from distwrap._internals.torch_tree import tree_unflatten
from distwrap.checks import is_number
from distwrap.errors import CollectiveError, OptionError
from distwrap.group.collectives import Description, compare, everyones, is_alone, tensors_in
from distwrap.group.tensor_exchange import gather_tensor, ranks_of_shares, reduce_tensor
from distwrap.group.world import current_world, say_once

Number = TypeVar("Number", bound=float)
Tensors = TypeVar("Tensors", bound="Sequence[TensorTree] | Mapping[Any, TensorTree]")
TensorTree: TypeAlias = "torch.Tensor | Sequence[TensorTree] | Mapping[Any, TensorTree]"


@overload
def gather(
    value: torch.Tensor, *, differentiable: bool | None = None, interleave: bool = False, pad: float | None = None
) -> torch.Tensor: ...
@overload
def gather(
    value: Number, *, differentiable: bool | None = None, interleave: bool = False, pad: float | None = None
) -> torch.Tensor | Number: ...
@overload
def gather(
    value: Tensors, *, differentiable: bool | None = None, interleave: bool = False, pad: float | None = None
) -> Tensors: ...
@overload
def gather(
    value: Any, *, differentiable: bool | None = None, interleave: bool = False, pad: float | None = None
) -> Any: ...


def gather(
    value: Any, *, differentiable: bool | None = None, interleave: bool = False, pad: float | None = None
) -> Any:
    """Concatenate the tensors of all ranks along the first dimension, in rank order, on every rank.

    The first dimension may differ between ranks, and may be 0. A number or a 0-d tensor becomes one element for each
    rank.

    Args:
        value: a tensor of shape (n, …), a number, or a nesting of them.
        differentiable: let gradients flow back to the rank from which a row comes, summed over all ranks, as a
            contrastive loss over the joint batch needs. All ranks must then call ``backward``. With DDP's average the
            gradient is that of one process, if each rank computes the loss of the joint batch, or the mean over its own
            rows. By default gradients flow where a tensor requires a gradient on every rank.
        interleave: take one row of each rank in turn. For a loader in order, shared by ``mode="exact"``, that is the
            order of the dataset.
        pad: fill the other dimensions at their ends with this number, up to the longest over all ranks, for sequences
            whose lengths differ between ranks. Without it these dimensions must be equal.

    Returns:
        The same nesting, with tensors of shape (sum of all n, …), or (sum of all n, longest, …) where they are padded.
        In a single process it is `value` itself.

    Raises:
        CollectiveError: the ranks hold different structures, dtypes, trailing shapes (with `pad`: numbers of
            dimensions) or values of `pad`, or the dtype of a tensor cannot hold `pad`; raised on every rank.
        OptionError: `pad` is not a number.

    Example:
        >>> gather(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if pad is not None and not is_number(pad):
        raise OptionError(f"gather(pad={pad!r}): it must be a number, or None.")
    if is_alone("gather"):
        return value
    _, spec, tensors = tensors_in(value, "gather")
    tensors = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    structure = spec if pad is None else f"{spec} padded with {pad}"
    call = "gather(interleave=True)" if interleave else "gather()"
    everyone = everyones(call, structure, tensors, _cannot_pad(tensors, pad))
    compare(
        [
            (structure, [(dtype, shape[1:] if pad is None else ("any",) * len(shape[1:])) for dtype, shape in rows])
            for structure, rows, _ in everyone
        ],
        "gather",
        [(structure, rows) for structure, rows, _ in everyone],
    )
    shares = [everyone[rank] for rank in ranks_of_shares()]
    if pad is not None:
        tensors = [_padded(tensor, pad, [rows[i][1] for _, rows, _ in shares]) for i, tensor in enumerate(tensors)]
    sizes = [[rows[index][1][0] for _, rows, _ in shares] for index in range(len(tensors))]
    if differentiable is not False and _want_gradients(everyone, refused=differentiable is True):
        gathered = [_Gathered.apply(leaf, each) for leaf, each in zip(tensors, sizes, strict=True)]  # type: ignore[no-untyped-call]
    else:
        gathered = [gather_tensor(leaf.detach(), each) for leaf, each in zip(tensors, sizes, strict=True)]
    if interleave:
        gathered = [rows[_in_turn(each).to(rows.device)] for rows, each in zip(gathered, sizes, strict=True)]
    return tree_unflatten(gathered, spec)


def _cannot_pad(tensors: list[torch.Tensor], pad: float | None) -> str:
    """Return why tensors cannot be filled up with a number; empty where they can."""
    if pad is None:
        return ""
    for tensor in tensors:
        has_fractions = tensor.is_floating_point() or tensor.is_complex()
        is_bool = tensor.dtype == torch.bool
        limits = torch.finfo(tensor.dtype) if has_fractions else torch.iinfo(torch.uint8 if is_bool else tensor.dtype)
        fits = limits.min <= pad <= (1 if is_bool else limits.max)
        if not ((fits and (has_fractions or float(pad).is_integer())) or (has_fractions and _is_no_finite(pad))):
            return f"gather(pad={pad}): {str(tensor.dtype).removeprefix('torch.')} does not hold this number."
    return ""


def _is_no_finite(number: float) -> bool:
    return number in (math.inf, -math.inf) or math.isnan(number)


def _padded(tensor: torch.Tensor, pad: float, shapes: list[tuple[int, ...]]) -> torch.Tensor:
    """Return a tensor whose dimensions, but for the first, are the longest of some shapes."""
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)][1:]
    if list(tensor.shape[1:]) == longest:
        return tensor
    result = tensor.new_full((len(tensor), *longest), pad)
    result[tuple(map(slice, tensor.shape))] = tensor
    return result


def _in_turn(sizes: list[int]) -> torch.Tensor:
    """Return where the rows of all ranks are, one after the other, when the ranks take turns."""
    return torch.cat([torch.arange(size) * len(sizes) + rank for rank, size in enumerate(sizes)]).argsort()


def _want_gradients(everyone: list[Description], *, refused: bool) -> bool:
    """Return whether tensors require a gradient, the same on all ranks; where they differ, say so, or raise."""
    for rank, (_, _, wanted) in enumerate(everyone):
        if wanted != everyone[0][2]:
            which = f"a tensor requires a gradient on rank 0 but not on rank {rank}, or the other way round"
            if refused:
                raise CollectiveError(
                    f"gather(differentiable=True): {which}, whose backward would wait for it forever."
                )
            say_once("gather", f"gather(): {which}, so no gradient flows back through it.")
            return False
    return any(everyone[0][2])


class _Gathered(torch.autograd.Function):
    """Gather whose backward sums all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes = sizes
        return gather_tensor(leaf, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        everyones = reduce_tensor(grad, "sum")
        share = current_world().layout.rank
        start = sum(ctx.sizes[:share])
        return everyones[start : start + ctx.sizes[share]], None
