"""Prove that all ranks hold the same weights, or name the first tensor that differs and the ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distwrap._internals.torch import names_ddp_ignores
from distwrap.devices.kinds import widest
from distwrap.errors import DriftError, ModelError
from distwrap.group.collectives import gather_object
from distwrap.group.world import current_world
from distwrap.model.buffers import statistics_of
from distwrap.model.fingerprints import fold, with_type
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import bound_strategy
from distwrap.protocols import Held as Held
from distwrap.wording import named_ranks

# The name of a tensor; of what is here its bits, its size and the sum of its absolute values; and which part that is.
Mark = Sequence[Any]

# Between processors of different kinds, which may round the last bit differently.
_ROUNDING = 1e-6
_CHUNK = 2**14  # numbers, of which the absolute values fit into memory that is at hand


def assert_in_sync(model: nn.Module) -> None:
    """Check that all ranks hold the same weights and buffers, bit by bit; a collective, and a no-op in one process.

    Running statistics of norms are left out, since each rank has its own while it trains. Only fingerprints are sent.
    distwrap also compares weights by itself during the training.

    Args:
        model: a model, wrapped or not.

    Raises:
        ModelError: `model` is not a module.
        DriftError: a tensor differs; the message names the first one, and the ranks. Raised on every rank.

    Example:
        >>> assert_in_sync(nn.Linear(2, 1))
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"assert_in_sync() takes an nn.Module, not a {type(model).__qualname__}. To compare anything else, "
            "use gather_object(), or reduce() with op='min' and op='max'."
        )
    if current_world().placement.world_size == 1:
        return
    strategy = bound_strategy(model)
    held = tensors_of(model) if strategy is None else strategy.held(model)
    everyone = gather_object(fingerprints(list(held)))
    difference = first_difference(everyone)
    if difference is not None:
        raise DriftError(f"{type(unwrap_model(model)).__name__} is not the same on all ranks: {difference}.")


def tensors_of(model: nn.Module) -> list[Held]:
    """Return a replicated model's parameters and buffers, but for running statistics."""
    net, own = unwrap_model(model), left_to_ranks(model)
    named = (*net.named_parameters(), *net.named_buffers())
    return [Held(name, "", value) for name, value in named if name not in own]


def left_to_ranks(model: nn.Module) -> set[str]:
    """Name the tensors of which each rank has its own: running statistics, and what the user has told DDP to ignore."""
    net = unwrap_model(model)
    return {*statistics_of(net), *names_ddp_ignores(net)}


def fingerprints(held: Sequence[Held]) -> list[Mark]:
    """Return each tensor's name, what `numbers_of` says of it, and its part."""
    return marks(held, numbers_of(held))


def numbers_of(held: Sequence[Held]) -> torch.Tensor:
    """Return two numbers a tensor, its bits' hash and the bits of the sum of its absolute values, without waiting."""
    tensors = [value for *_, value in held if isinstance(value, torch.Tensor)]
    found = [torch.stack([fold(value), _bits(_size(value))]).to(tensors[0].device) for value in tensors]
    return torch.stack(found) if found else torch.zeros(0, 2, dtype=torch.int64)


def marks(held: Sequence[Held], numbers: torch.Tensor) -> list[Mark]:
    """Return the marks of tensors of which the numbers are known; this waits for their device."""
    folded, bits = (column.contiguous() for column in numbers.cpu().unbind(1))
    wide, narrow = bits.view(torch.float64), bits.to(torch.int32).view(torch.float32)
    known = zip(folded.tolist(), wide.tolist(), narrow.tolist(), strict=True)
    found: list[Mark] = []
    for name, part, value in held:
        if isinstance(value, torch.Tensor):
            hashed, *sizes = next(known)
            size = sizes[0] if widest(value.device) == torch.float64 else sizes[1]
            found.append((name, (with_type(hashed, value), value.numel(), size), part))
        else:
            found.append((name, (0, -1, float(value)), part))
    return found


def part_of(mark: Mark) -> str:
    """Return which part a mark is of."""
    return mark[2] if len(mark) > 2 else ""


def first_rank(part: str) -> int | None:
    """Return the first rank that has a part; ``None`` where every rank has the whole."""
    return int(part.partition(":")[0]) if part else None


def _size(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.zeros((), dtype=widest(tensor.device), device=tensor.device)
    with torch.no_grad():
        wide = tensor.detach().reshape(-1)
        chunks = wide.split(_CHUNK if tensor.device.type == "cpu" else max(1, wide.numel()))  # type: ignore[no-untyped-call]
        kind = torch.promote_types(wide[:0].abs().dtype, torch.float32)
        return torch.stack([chunk.abs().sum(dtype=kind).to(widest(tensor.device)) for chunk in chunks]).sum()


def _bits(number: torch.Tensor) -> torch.Tensor:
    return number.view(torch.int64 if number.dtype == torch.float64 else torch.int32).to(torch.int64)


def first_difference(
    everyone: Sequence[Sequence[Mark]], *, exact: bool = True, ranks: Sequence[int] | None = None
) -> str | None:
    """Return which tensor is the first that differs between ranks, and on which ranks it is which.

    Args:
        everyone: each rank's `fingerprints`, in rank order.
        exact: whether a difference in the last bit counts.
        ranks: whose they are; by default 0, 1, ….
    """
    ranks = range(len(everyone)) if ranks is None else ranks
    of_part: dict[str, dict[int, list[Mark]]] = {"": {rank: [] for rank in ranks}}
    for rank, marks in zip(ranks, everyone, strict=True):
        for mark in marks:
            of_part.setdefault(part_of(mark), {}).setdefault(rank, []).append(mark)
    return next(filter(None, (_first_difference_of(held, exact) for held in of_part.values())), None)


def _first_difference_of(held: dict[int, list[Mark]], exact: bool) -> str | None:
    """Return the first difference between ranks that hold the same tensors, or parts of them."""
    first, *others = held
    names = [name for name, *_ in held[first]]
    for rank in others:
        own = [name for name, *_ in held[rank]]
        if own != names:
            other = next((name for name in [*own, *names] if (name in own) != (name in names)), "their order")
            return f"rank {rank} does not hold the same tensors as rank {first} ({other})"
    for index, name in enumerate(names):
        parts: dict[str, dict[tuple[float, ...], list[int]]] = {}
        for rank, marks in held.items():
            _, mark, *part = marks[index]
            parts.setdefault("".join(part), {}).setdefault(tuple(mark), []).append(rank)
        for which, groups in parts.items():
            if len(groups) > 1 and (exact or not _is_rounding(list(groups))):
                told = " and ".join(f"{named_ranks(ranks)} {_in_words(mark)}" for mark, ranks in groups.items())
                where = which.partition(":")[2].strip()
                return f"{name!r}{where and f' ({where})'} is the first that differs: {told}"
    return None


def _in_words(mark: tuple[float, ...]) -> str:
    return f"{mark[2]:g}" if mark[1] < 0 else f"one whose absolute values sum to {mark[2]:.9g}"


def _is_rounding(marks: list[tuple[float, ...]]) -> bool:
    sums = [mark[2] for mark in marks]
    return len({mark[1] for mark in marks}) == 1 and max(sums) - min(sums) <= _ROUNDING * max(map(abs, sums)) > 0
