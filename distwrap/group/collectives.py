"""Exchange values between ranks. Every rank must call; in a single process each returns what it was given.

Values may be tensors, numbers, or lists, tuples and dicts of them in any nesting.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from distwrap._internals.torch_tree import tree_flatten, tree_unflatten
from distwrap.checks import one_of
from distwrap.errors import CollectiveError, OptionError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.setup import require_group
from distwrap.group.signing import sign, verify
from distwrap.group.world import current_world
from distwrap.supervision.hang_report import Activity

Value = TypeVar("Value")
Op = Literal["mean", "sum", "min", "max"]

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def barrier() -> None:
    """Wait until every rank is here."""
    if _alone("barrier"):
        return
    dist.barrier(device_ids=[current_world().device.index] if dist.get_backend() == "nccl" else None)


def gather(value: Any, *, differentiable: bool = False) -> Any:
    """Concatenate every rank's tensors along the first dimension, in rank order, on every rank.

    The first dimension may differ between ranks, and be 0; a number or 0-d tensor of each rank becomes one element.

    Args:
        value: a tensor of shape (n, …), a number, or a nesting of them.
        differentiable: let gradients flow back to the rank that a row comes from, summed over all ranks, as a
            contrastive loss over the joint batch needs. All ranks must then call ``backward``. With DDP's average, the
            gradient is that of one process where each rank computes the loss of the joint batch, or the mean over its
            own rows.

    Returns:
        The same nesting with tensors of shape (sum of all n, …); in a single process `value` itself.

    Raises:
        CollectiveError: the ranks hold different structures, dtypes or trailing shapes; on every rank.

    Example:
        >>> gather(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if _alone("gather"):
        return value
    leaves, spec, tensors = _tensors(value, "gather")
    tensors = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    everyone = _everyones(spec, tensors)
    _compare([(structure, [(d, s[1:]) for d, s in rows]) for structure, rows in everyone], "gather")
    shares = [everyone[rank] for rank in _ranks_of_shares()]
    sizes = [[rows[index][1][0] for _, rows in shares] for index in range(len(tensors))]
    if differentiable:
        sources = [leaf.reshape(1) if leaf.dim() == 0 else leaf for leaf in _with_gradients(leaves, tensors)]
        gathered = [_Gathered.apply(leaf, each) for leaf, each in zip(sources, sizes, strict=True)]  # type: ignore[no-untyped-call]
    else:
        gathered = [_gather_leaf(leaf, each) for leaf, each in zip(tensors, sizes, strict=True)]
    return tree_unflatten(gathered, spec)


def _with_gradients(leaves: list[Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves as they are, where they require a gradient on all ranks or on none; raise on all ranks else."""
    own = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    for rank, theirs in enumerate(gather_object(own)):
        if theirs != own:
            raise CollectiveError(
                f"gather(differentiable=True): some tensor requires a gradient on rank {dist.get_rank()} or {rank} and "
                f"not on the other, whose backward would wait for it forever."
            )
    return [leaf if grad else tensor for leaf, tensor, grad in zip(leaves, tensors, own, strict=True)]


class _Gathered(torch.autograd.Function):
    """Gather whose backward sums all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes = sizes
        return _gather_leaf(leaf, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        everyones = _reduce_leaf(grad, "sum")
        share = current_world().layout.rank
        start = sum(ctx.sizes[:share])
        return everyones[start : start + ctx.sizes[share]], None


def gather_object(value: Value) -> list[Value]:
    """Return every rank's value, in rank order, on every rank; anything that can be pickled.

    Example:
        >>> gather_object("here")
        ['here']
    """
    if _alone("gather_object"):
        return [value]
    secret = current_world().secret
    mine = _tensor_of(sign(value, secret))
    sizes = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=mine.device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=mine.device)
    padded[: mine.numel()] = mine
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [
        verify(_bytes_of(message[: int(size)]), secret, rank)
        for rank, (message, size) in enumerate(zip(received, sizes, strict=True))
    ]


def reduce(value: Any, op: Op = "mean") -> Any:
    """Combine every rank's values element by element, on every rank; the tensors given are not changed.

    Args:
        value: a tensor, a number, or a nesting of them, with the same shapes on every rank.
        op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``. Of whole numbers or booleans a mean is a float64, a sum an
            int64.

    Raises:
        CollectiveError: the ranks hold different structures, dtypes or shapes; on every rank.

    Example:
        >>> reduce(3.0)
        3.0
    """
    one_of("op", get_args(Op))("op", op)
    if _alone("reduce"):
        return value
    leaves, spec, tensors = _tensors(value, "reduce")
    _compare(_everyones(spec, tensors), "reduce")
    reduced = [_reduce_leaf(tensor, op) for tensor in tensors]
    kept = [new if isinstance(old, torch.Tensor) else new.item() for old, new in zip(leaves, reduced, strict=True)]
    return tree_unflatten(kept, spec)


def mean(value: Any, count: float = 1) -> Any:
    """Average over ranks, each rank's value weighted by how many items it stands for.

    sum(value · count) / sum(count) over the ranks, in float64.

    Args:
        value: this rank's mean over its items: a number, a tensor, or a nesting of them. Ignored where `count` is 0.
        count: how many items that was.

    Returns:
        The mean over all ranks' items, of the type it was given, but for whole numbers, whose mean is a float64; in a
        single process `value` itself.

    Raises:
        CollectiveError: no rank has any item, or the ranks hold different structures or shapes; on every rank.

    Example:
        >>> mean(0.25, count=4)
        0.25
    """
    if _alone("mean"):
        return value
    leaves, spec, tensors = _tensors(value, "mean")
    exact = [tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in tensors]
    weighted = [tensor * count if count else torch.zeros_like(tensor) for tensor in exact]
    *sums, everything = reduce([*weighted, float(count)], op="sum")
    if everything == 0:
        raise CollectiveError("mean(): the count is 0 on every rank, so there is nothing to average.")
    means = [_as_given(leaf, value / everything) for leaf, value in zip(leaves, sums, strict=True)]
    return tree_unflatten(means, spec)


def _as_given(leaf: Any, result: torch.Tensor) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return result.item()
    return result.to(leaf.dtype) if leaf.is_floating_point() or leaf.is_complex() else result


def broadcast(value: Any, src: int = 0) -> Any:
    """Return rank `src`'s value on every rank; what the others pass is ignored.

    Args:
        value: a tensor, or anything that can be pickled, with tensors in any nesting.
        src: the rank whose value it is.

    Example:
        >>> broadcast({"lr": 0.1})
        {'lr': 0.1}
    """
    world = current_world()
    if not 0 <= src < world.placement.world_size:
        raise OptionError(f"broadcast(src={src}): ranks are 0 to {world.placement.world_size - 1}.")
    if _alone("broadcast"):
        return value
    mine = world.placement.rank == src
    leaves, spec = tree_flatten(value if mine else None)
    described = [
        _Described(leaf.dtype, leaf.shape, leaf.device.type) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    # The nesting itself travels, with its tensors described: a pickled TreeSpec warns in torch when it is read.
    message = _broadcast_object(tree_unflatten(described, spec) if mine else None, src)
    described, spec = tree_flatten(message)
    received: list[Any] = []
    for index, what in enumerate(described):
        if not isinstance(what, _Described):
            received.append(what)
        elif mine:
            leaf = leaves[index]
            dist.broadcast(_as_bytes(leaf.detach().to(_device_for(leaf)).contiguous()), src=src)
            received.append(leaf)
        else:
            tensor = torch.empty(what.shape, dtype=what.dtype, device=_exchange_device())
            dist.broadcast(_as_bytes(tensor), src=src)
            received.append(tensor.cpu() if what.device == "cpu" else tensor)
    return tree_unflatten(received, spec)


def agree(flag: bool, how: Literal["any", "all"] = "any") -> bool:
    """Let all ranks take the same branch: true where any rank, or every rank, says so.

    Example:
        >>> agree(True, "all")
        True
    """
    one_of("way to agree", ("any", "all"))("how", how)
    if _alone("agree"):
        return bool(flag)
    vote = torch.tensor(int(bool(flag)), device=_exchange_device())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX if how == "any" else dist.ReduceOp.MIN)
    return bool(vote.item())


def total(number: float) -> float:
    """Return the sum of a number over the shares of the data, in float64, by one all-reduce: for use in a step."""
    if _alone("total"):
        return number
    value = torch.tensor(number, dtype=torch.float64, device=_exchange_device())
    dist.all_reduce(value, group=current_world().layout.group)
    return value.item()


@dataclass(frozen=True)
class _Described:
    """Description of a tensor, from which the other ranks make one to receive it."""

    dtype: torch.dtype
    shape: torch.Size
    device: str


def _broadcast_object(value: Any, src: int) -> Any:
    world = current_world()
    mine = world.placement.rank == src
    message = _tensor_of(sign(value, world.secret)) if mine else torch.empty(0)
    size = torch.tensor([message.numel()], device=_exchange_device())
    dist.broadcast(size, src=src)
    if not mine:
        message = torch.empty(int(size), dtype=torch.uint8, device=_exchange_device())
    dist.broadcast(message, src=src)
    return value if mine else verify(_bytes_of(message), world.secret, src)


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_exchange_device())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    data = bytearray(tensor.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return bytes(data)


def _alone(what: str) -> bool:
    world = current_world()
    if world.placement.world_size == 1:
        return True
    require_group(what)
    check_collectives_allowed(f"{what}()")
    world.part(Activity).record(what)
    return False


def _exchange_device() -> torch.device:
    """Return the device on which a tensor must be for this group's backend."""
    return torch.device("cpu") if "gloo" in dist.get_backend() else current_world().device


def _device_for(leaf: torch.Tensor) -> torch.device:
    return leaf.device if leaf.device.type != "cpu" else _exchange_device()


def _tensors(value: Any, what: str) -> tuple[list[Any], Any, list[torch.Tensor]]:
    """Return a value's leaves, its structure, and the leaves as tensors; raise on all ranks where one cannot be."""
    leaves, spec = tree_flatten(value)
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf.detach())
        elif isinstance(leaf, (int, float)):
            tensors.append(torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None))
        else:
            problem = (
                f"{what}() takes tensors and numbers in lists, tuples and dicts, not a {type(leaf).__qualname__}. "
                f"For other objects there is gather_object()."
            )
            _everyones(spec, [], problem)  # raises it, on every rank
    return leaves, spec, tensors


def _everyones(spec: Any, tensors: list[torch.Tensor], problem: str = "") -> list[tuple[str, list[Any]]]:
    """Return each rank's structure, and its tensors' dtypes and shapes; raise the problem of any rank."""
    mine = (str(spec), [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], problem)
    everyone = gather_object(mine)
    for rank, (_, _, problem) in enumerate(everyone):
        if problem:
            raise CollectiveError(f"rank {rank}: {problem}")
    return [(structure, rows) for structure, rows, _ in everyone]


def _compare(descriptions: list[Any], what: str) -> None:
    for rank, description in enumerate(descriptions):
        if description != descriptions[0]:
            raise CollectiveError(
                f"{what}(): the ranks hold different things. Rank 0 has {_words(descriptions[0])}, "
                f"rank {rank} has {_words(description)}."
            )


def _words(description: tuple[str, list[Any]]) -> str:
    structure, rows = description
    leaves = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in rows) or "nothing"
    return leaves if structure == str(tree_flatten(0)[1]) else f"{leaves} in {structure}"


def _ranks_of_shares() -> list[int]:
    """Return the ranks that `gather` and `reduce` of this rank combine, in the order of their shares."""
    group = current_world().layout.group
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _gather_leaf(leaf: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    device = _device_for(leaf)
    longest = max(sizes)
    padded = torch.zeros((longest, *leaf.shape[1:]), dtype=leaf.dtype, device=device)
    padded[: leaf.shape[0]] = leaf.to(device)
    received = [torch.empty_like(padded) for _ in sizes]
    # As bytes, since gloo knows neither int16 nor the new float types.
    dist.all_gather([_as_bytes(part) for part in received], _as_bytes(padded), group=current_world().layout.group)
    return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)]).to(leaf.device)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _reduce_leaf(leaf: torch.Tensor, op: Op) -> torch.Tensor:
    layout = current_world().layout
    whole = not leaf.dtype.is_floating_point and not leaf.dtype.is_complex
    total = leaf.to(_device_for(leaf), copy=True).contiguous()
    if whole:  # in 64 bits: a sum must not wrap around, and gloo does not know all the others
        total = total.to(torch.float64 if op == "mean" else torch.int64)
    dist.all_reduce(total, op=_OPS[op], group=layout.group)
    if op == "mean":
        total = total / layout.size
    elif whole and op != "sum":
        total = total.to(leaf.dtype)
    return total.to(leaf.device)
