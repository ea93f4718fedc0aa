"""Exchange values between ranks. Every rank must call; in a single process each returns what it was given.

Values may be tensors, numbers, or lists, tuples and dicts of them in any nesting.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast, get_args, overload

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from distwrap._internals.torch_tree import tree_flatten, tree_unflatten
from distwrap.checks import one_of
from distwrap.devices.kinds import widest
from distwrap.errors import CollectiveError, OptionError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.messages import cannot_be_sent, of_every_rank, tensor_of
from distwrap.group.setup import require_group
from distwrap.group.signing import only_plain, run_secret, sign, verify
from distwrap.group.tensor_exchange import OP_HINTS, Op, exchange_device, gather_numbers, ranks_of_shares, reduce_tensor
from distwrap.group.tensors_apart import as_bytes, bytes_of, is_dense, of_bytes, put_together, take_apart
from distwrap.group.world import current_world
from distwrap.supervision.activity import Activity
from distwrap.supervision.order_check import SAME_CALLS

Value = TypeVar("Value")
Key = TypeVar("Key")
Whole = TypeVar("Whole", bound=int)


def barrier() -> None:
    """Wait until every rank has called this; return at once in a single process."""
    if is_alone("barrier"):
        return
    world = current_world()
    with world.part(Activity).exchanging_nothing():
        world.barrier()


@overload
def gather_object(value: Value, *, joined: Literal[False] = False) -> list[Value]: ...
@overload
def gather_object(value: Sequence[Value], *, joined: Literal[True]) -> list[Value]: ...


def gather_object(value: Any, *, joined: bool = False) -> list[Any]:
    """Return every rank's value as a list in rank order, on every rank.

    A value may be anything that can be pickled. Where the ranks share no secret, only plain data is sent: see
    docs/explanation/security.md.

    Args:
        value: this rank's value.
        joined: take lists, of any length, and return one list of all their items. For the results of `split`, that list
            is in the order of the original one.

    Raises:
        CollectiveError: a value cannot be sent, or is not a list although `joined` is set; raised on every rank.

    Example:
        >>> gather_object("here")
        ['here']
        >>> gather_object(["a", "b"], joined=True)
        ['a', 'b']
    """
    problem = ""
    if joined and not isinstance(value, (list, tuple)):
        problem = f"gather_object(joined=True) takes a list, not a {type(value).__qualname__}"
    if is_alone("gather_object"):
        if problem:
            raise CollectiveError(f"{problem}.")
        return list(value) if joined else [value]
    values = of_every_rank(value, problem)
    return [item for rank in ranks_of_shares() for item in values[rank]] if joined else values


@overload
def reduce(value: torch.Tensor, op: Op = "mean") -> torch.Tensor: ...
@overload
def reduce(value: int, op: Literal["sum", "product"]) -> int: ...
@overload
def reduce(value: float, op: Literal["mean", "sum", "product"] = "mean") -> float: ...
@overload
def reduce(value: list[Whole], op: Literal["mean"] = "mean") -> list[float]: ...
@overload
def reduce(value: dict[Key, Whole], op: Literal["mean"] = "mean") -> dict[Key, float]: ...
@overload
def reduce(value: Value, op: Op = "mean") -> Value: ...


def reduce(value: Any, op: Op = "mean") -> Any:
    """Combine the values of all ranks element by element, and return the result on every rank.

    The tensors that are given stay as they are.

    Args:
        value: a tensor, a number, or a nesting of them, with the same shapes on every rank.
        op: ``"mean"``, ``"sum"``, ``"product"``, ``"min"`` or ``"max"``. The mean of whole numbers or booleans is a
            float64 (a float32 on a device without float64), and their sum or product an int64. Where a rank has NaN,
            the result is NaN.

    Raises:
        CollectiveError: the ranks hold different structures, dtypes or shapes; or complex numbers are asked for their
            minimum or maximum; or a sum or product is too large for an int64. Raised on every rank.

    Example:
        >>> reduce(3.0)
        3.0
    """
    one_of("op", get_args(Op), OP_HINTS)("op", op)
    if is_alone("reduce"):
        return value
    return _combined(f"reduce(op={op!r})", value, op)


def _combined(call: str, value: Any, op: Op) -> Any:
    what = call.partition("(")[0]
    leaves, spec, tensors = tensors_in(value, what)
    everyone = everyones(call, spec, tensors, _cannot_reduce(tensors, op))
    compare([(structure, rows) for structure, rows, _ in everyone], what)
    reduced = [reduce_tensor(tensor, op) for tensor in tensors]
    kept = [new if isinstance(old, torch.Tensor) else new.item() for old, new in zip(leaves, reduced, strict=True)]
    return tree_unflatten(kept, spec)


def _cannot_reduce(tensors: list[torch.Tensor], op: Op) -> str:
    """Return why tensors of this rank cannot be combined; empty where they can."""
    if op not in ("min", "max") or not any(tensor.is_complex() for tensor in tensors):
        return ""
    return (
        f"reduce(op={op!r}) takes no complex numbers, which have no order. Give it their .abs(), or their two parts as "
        f"torch.view_as_real(x); op='sum', 'mean' and 'product' take complex numbers."
    )


@overload
def mean(value: torch.Tensor, count: float = 1) -> torch.Tensor: ...
@overload
def mean(value: float, count: float = 1) -> float: ...
@overload
def mean(value: list[Whole], count: float = 1) -> list[float]: ...
@overload
def mean(value: dict[Key, Whole], count: float = 1) -> dict[Key, float]: ...
@overload
def mean(value: Value, count: float = 1) -> Value: ...


def mean(value: Any, count: float = 1) -> Any:
    """Return the mean over all ranks, in which each rank's value counts for as many items as it stands for.

    The result is sum(value · count) / sum(count) over the ranks, computed in float64.

    Args:
        value: the mean over this rank's items: a number, a tensor, or a nesting of them. It is ignored where `count` is
            0.
        count: the number of this rank's items.

    Returns:
        The mean over all ranks' items, in the type of `value`. For whole numbers it is a float64, or a float32 on a
        device without float64. In a single process it is `value` itself.

    Raises:
        CollectiveError: no rank has any item, or the ranks hold different structures or shapes; raised on every rank.

    Example:
        >>> mean(0.25, count=4)
        0.25
    """
    if is_alone("mean"):
        return value
    leaves, spec, tensors = tensors_in(value, "mean")
    exact = [_in_float64(tensor.detach()) for tensor in tensors]
    weighted = [tensor * count if count else torch.zeros_like(tensor) for tensor in exact]
    parts: list[Any] = [*weighted, float(count)]
    *sums, everything = _combined("mean()", parts, "sum")
    if everything == 0:
        raise CollectiveError("mean(): the count is 0 on every rank, so there is nothing to average.")
    means = [_as_given(leaf, value / everything) for leaf, value in zip(leaves, sums, strict=True)]
    return tree_unflatten(means, spec)


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    if widest(tensor.device) != torch.float64:
        tensor = tensor.cpu()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _as_given(leaf: Any, result: torch.Tensor) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return result.item()
    kept = leaf.is_floating_point() or leaf.is_complex()
    return result.to(leaf.dtype if kept else widest(leaf.device)).to(leaf.device)


def broadcast(value: Value | None, src: int = 0) -> Value:
    """Return the value of rank `src` on every rank; the values that other ranks pass are ignored.

    Args:
        value: a tensor, or anything that can be pickled, with tensors in any nesting. Where the ranks share no secret,
            only plain data is sent (docs/explanation/security.md).
        src: the rank whose value is returned.

    Example:
        >>> broadcast({"lr": 0.1})
        {'lr': 0.1}
    """
    world = current_world()
    if not 0 <= src < world.placement.world_size:
        raise OptionError(f"broadcast(src={src}): ranks are 0 to {world.placement.world_size - 1}.")
    if is_alone("broadcast", f"(src={src})"):
        return cast("Value", value)
    mine = world.placement.rank == src
    tensors: list[torch.Tensor] = []
    message: tuple[str, bytes, list[_Described]] = ("", b"", [])
    secret = run_secret()
    if mine:
        try:
            data, tensors = take_apart(value, plain=only_plain(secret))
            message = ("", data, [(each.dtype, each.shape, each.device.type) for each in tensors])
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            message = (f"rank {src}: {cannot_be_sent(value, error)}", b"", [])
    problem, data, described = _broadcast_object(message, src, secret)
    if problem:
        raise CollectiveError(problem)
    if mine:
        for tensor in tensors:
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            dist.broadcast(as_bytes(plain).to(exchange_device()), src=src)
        return cast("Value", value)
    for dtype, shape, device in described:
        received = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8, device=exchange_device())
        dist.broadcast(received, src=src)
        tensors.append(of_bytes(received.to("cpu" if device == "cpu" else world.device), dtype, shape))
    return cast("Value", put_together(data, tensors, plain=only_plain(secret)))


def agree(flag: bool, how: Literal["any", "all"] = "any") -> bool:
    """Return whether any rank, or every rank, has a true flag, so that all ranks take the same branch.

    Args:
        flag: this rank's answer.
        how: ``"any"`` for true where one rank says so, ``"all"`` for true where every rank does.

    Raises:
        CollectiveError: the ranks want to agree in different ways; raised on every rank.

    Example:
        >>> agree(True, "all")
        True
    """
    one_of("way to agree", ("any", "all"))("how", how)
    if is_alone("agree"):
        return bool(flag)
    wants_any = how == "any"
    vote = torch.tensor([int(bool(flag) == wants_any), int(wants_any), int(not wants_any)], device=exchange_device())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    found, some_want_any, some_want_all = vote.tolist()
    if some_want_any and some_want_all:
        raise CollectiveError(f"some ranks call agree(how='any') where others call agree(how='all'). {SAME_CALLS}")
    return bool(found) == wants_any


def total(number: float) -> float:
    """Return the sum of a number over the shares of the data, in float64, by one all-gather: for use in a step."""
    if is_alone("total"):
        return number
    return sum(each for (each,) in gather_numbers([number], current_world().layout.group))


_Described = tuple[torch.dtype, torch.Size, str]  # dtype, shape and device of a tensor that the others are to receive


def _broadcast_object(value: Any, src: int, secret: bytes) -> Any:
    mine = current_world().placement.rank == src
    message = tensor_of(sign(value, secret)) if mine else torch.empty(0)
    size = torch.tensor([message.numel()], device=exchange_device())
    dist.broadcast(size, src=src)
    if not mine:
        message = torch.empty(int(size), dtype=torch.uint8, device=exchange_device())
    dist.broadcast(message, src=src)
    return value if mine else verify(bytes_of(message), secret, src)


def is_alone(what: str, given: str = "") -> bool:
    """Return whether there is one process; else make sure that all ranks can come to a collective, and note it.

    Args:
        what: the collective's name.
        given: what all ranks must give it alike.
    """
    world = current_world()
    if world.placement.world_size == 1:
        return True
    require_group(what)
    check_collectives_allowed(f"{what}()")
    world.part(Activity).begin_collective(f"{what}{given}")
    return False


def tensors_in(value: Any, what: str) -> tuple[list[Any], Any, list[torch.Tensor]]:
    """Return a value's leaves, its structure, and the leaves as tensors; raise on all ranks where one cannot be."""
    try:
        leaves, spec = tree_flatten(value, lambda part: isinstance(part, PackedSequence))  # a named tuple to pytree
    except RecursionError:
        everyones(
            f"{what}()", "", [], f"{what}() cannot follow containers that are nested so deep, or hold themselves."
        )
        raise
    tensors = []
    for leaf in leaves:
        problem = f"not a {type(leaf).__qualname__}. For other objects there is gather_object()"
        if isinstance(leaf, torch.Tensor):
            if is_dense(leaf):
                tensors.append(leaf)
                continue
            problem = "not sparse, quantised, nested or meta ones. Give it their to_dense() or dequantize()"
        elif isinstance(leaf, (int, float)):
            if isinstance(leaf, float) or -(2**63) <= leaf < 2**63:
                tensors.append(torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None))
                continue
            problem = f"and {leaf} does not fit into 64 bits. Give it a float"
        problem = f"{what}() takes tensors and numbers in lists, tuples and dicts, {problem}."
        everyones(f"{what}()", spec, [], problem)  # raises it
    return leaves, spec, tensors


Description = tuple[str, list[Any], list[bool]]


def everyones(call: str, spec: Any, tensors: list[torch.Tensor], problem: str = "") -> list[Description]:
    """Return each rank's structure, its tensors' dtypes and shapes, and which of them require a gradient.

    Raises the problem of any rank, on every rank.

    Args:
        call: the collective, with what all ranks must give it alike.
        spec: this rank's structure.
        tensors: what is in it.
        problem: why this rank cannot go on; empty where it can.
    """
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    mine = (str(spec), [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], wanted)
    return of_every_rank(mine, problem, call)


def compare(descriptions: list[Any], what: str, shown: list[Any] | None = None) -> None:
    """Raise an error on every rank where the ranks' descriptions differ.

    Args:
        descriptions: one a rank.
        what: the collective's name.
        shown: the descriptions as the message has them, where it says more than what is compared.

    Raises:
        CollectiveError: says what rank 0 has, and another one.
    """
    for rank, description in enumerate(descriptions):
        if description != descriptions[0]:
            shown = descriptions if shown is None else shown
            raise CollectiveError(
                f"{what}(): the ranks hold different things. Rank 0 has {_words(shown[0])}, "
                f"rank {rank} has {_words(shown[rank])}."
            )


def _words(description: tuple[str, list[Any]]) -> str:
    structure, rows = description
    leaves = (
        ", ".join(f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]" for dtype, shape in rows)
        or "nothing"
    )
    return leaves if structure == str(tree_flatten(0)[1]) else f"{leaves} in {structure}"
