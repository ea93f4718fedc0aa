"""Exchange of one tensor, in the ways of `collectives`, by backends that do not know every type."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from distwrap.devices.kinds import widest
from distwrap.errors import CollectiveError
from distwrap.group.tensors_apart import as_bytes, of_bytes
from distwrap.group.world import current_world

Op = Literal["mean", "sum", "product", "min", "max"]
OP_HINTS = dict.fromkeys(("avg", "average"), "Did you mean 'mean'?")

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_OPS["product"] = dist.ReduceOp.PRODUCT


def exchange_device() -> torch.device:
    """Return the device on which a tensor must be for this group's backend; the same kind on all ranks.

    Where the CPU has a backend beside that of the devices, as in ``"cpu:gloo,cuda:nccl"``, it is the rank's device.
    """
    return torch.device("cpu") if dist.get_backend() == "gloo" else current_world().device


def ranks_of_shares() -> list[int]:
    """Return the ranks that `gather` and `reduce` of this rank combine, in the order of their shares."""
    group = current_world().layout.group
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def gather_numbers(numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> list[list[float]]:
    """Return the numbers of each rank of a group, as many on each, on any device: not all of them have float64."""
    mine = as_bytes(torch.tensor(numbers, dtype=torch.float64, device="cpu")).to(exchange_device())
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, mine, group=group)
    return [each.cpu().view(torch.float64).tolist() for each in received]


def gather_tensor(leaf: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return the tensors of all shares, one after the other, of which each has so many rows."""
    padded = leaf.new_zeros((max(sizes), *leaf.shape[1:]))
    padded[: leaf.shape[0]] = leaf
    # As bytes, since gloo knows neither int16 nor the new float types, and not all devices know float64.
    mine = as_bytes(padded).to(exchange_device())
    received = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(received, mine, group=current_world().layout.group)
    parts = [of_bytes(part.to(leaf.device), leaf.dtype, padded.shape) for part in received]
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_tensor(leaf: torch.Tensor, op: Op) -> torch.Tensor:
    """Return the tensors of all shares combined element by element.

    Raises:
        CollectiveError: a sum or a product of whole numbers is too large; on every rank.
    """
    dtype = leaf.dtype
    # A sum of float16 may overflow where the mean does not, and gloo does not know all the small types.
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    own = leaf.detach().to(_place_of(wide), wide, copy=True).contiguous()
    if dtype.is_complex or (dtype.is_floating_point and op in ("mean", "sum", "product")):
        result = _all_reduced(own, op).to(dtype)
    elif dtype.is_floating_point:  # with marks of NaN beside, which gloo and NCCL keep from some ranks only
        nan = own.isnan()
        marks = nan.to(wide) if op == "max" else -nan.to(wide)
        values, marks = _all_reduced(torch.stack([own.masked_fill(nan, 0), marks]), op)
        result = values.masked_fill(marks != 0, torch.nan).to(dtype)
    elif op == "mean":
        result = _all_reduced(own.to(torch.float64), op).to(widest(leaf.device))
    elif op in ("sum", "product"):
        about, result = _all_reduced(own.to(torch.float64), op), _all_reduced(own.to(torch.int64), op)
        if ((result - about).abs() > 2.0**62).any():
            raise CollectiveError(f"reduce(op={op!r}): a {op} of {dtype} is too large for an int64. Give it a float64.")
    elif dtype == torch.uint64:  # which no backend knows: in order where the sign is turned around
        sign = torch.iinfo(torch.int64).min
        result = (_all_reduced(own.view(torch.int64) ^ sign, op) ^ sign).view(dtype)
    else:
        result = _all_reduced(own.to(torch.int64), op).to(dtype)
    return result.to(leaf.device)


def _place_of(dtype: torch.dtype) -> torch.device:
    """Return where numbers of a type are combined: on the CPU what takes float64 where the devices have none."""
    device, takes_few = exchange_device(), dtype.is_floating_point and dtype.itemsize < 8
    return device if takes_few or dtype == torch.complex64 or widest(device) == torch.float64 else torch.device("cpu")


def _all_reduced(values: torch.Tensor, op: Op) -> torch.Tensor:
    layout = current_world().layout
    is_known = op != "product" or not values.is_complex()  # torch multiplies no complex numbers of several ranks
    if is_known and values.device.type == exchange_device().type:
        dist.all_reduce(values, op=_OPS[op], group=layout.group)
    else:
        everyones = gather_tensor(values.unsqueeze(0), [1] * layout.size)
        ways: dict[str, Callable[[int], torch.Tensor]] = {
            "max": everyones.amax, "min": everyones.amin, "product": everyones.prod,
        }  # fmt: skip
        values = ways.get(op, everyones.sum)(0)
    return values / layout.size if op == "mean" else values
