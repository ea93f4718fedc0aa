"""All collectives and messages of torch.distributed, for real ranks and simulated ones: what each gives a rank."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

RESULTS: dict[str, Callable[[int, int], Any]] = {}


def case(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    RESULTS[function.__name__] = function
    return function


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return numbers that differ between ranks."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count, dtype=torch.float64) * 1.25 + 10 * rank + 1).reshape(shape).to(dtype)


@case
def all_reduce(rank: int, size: int) -> Any:
    found = []
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        for dtype in (torch.float64, torch.float32, torch.int64, torch.int8, torch.uint8):
            tensor = own(rank, 3, dtype=dtype)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
            found.append(tensor)
    for name in ("BAND", "BOR", "BXOR"):
        tensor = own(rank, 4, dtype=torch.int32)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        found.append(tensor)
    return found


@case
def all_reduce_of_a_view(rank: int, size: int) -> Any:
    whole = own(rank, 4, 3)
    part = whole[1:3]
    dist.all_reduce(part)
    return whole


@case
def all_reduce_of_a_transposed_view(rank: int, size: int) -> Any:
    whole = own(rank, 4, 3)
    dist.all_reduce(whole.t())
    return whole


@case
def all_reduce_of_sparse_tensors(rank: int, size: int) -> Any:
    tensors = [torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (4,)) for _ in range(2)]
    dist.all_reduce(tensors[0])
    dist.all_reduce(tensors[1], async_op=True).wait()
    return [each.to_dense() for each in tensors]


@case
def several_at_once(rank: int, size: int) -> Any:
    tensors = [own(rank, 2), own(rank, 3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


@case
def reduce_to_each(rank: int, size: int) -> Any:
    found = []
    for root in range(size):
        tensor = own(rank, 3)
        dist.reduce(tensor, dst=root)
        found.append(tensor if rank == root else None)
    return found


@case
def broadcast_from_each(rank: int, size: int) -> Any:
    found = []
    for root in range(size):
        tensor = own(rank, 2, 2)
        dist.broadcast(tensor, src=root)
        found.append(tensor)
    return found


@case
def all_gather(rank: int, size: int) -> Any:
    rows = [torch.zeros(3, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(rows, own(rank, 3))
    flat = torch.zeros(3 * size, dtype=torch.float64)
    dist.all_gather_into_tensor(flat, own(rank, 3))
    return [*rows, flat]


@case
def reduce_scatter(rank: int, size: int) -> Any:
    out = torch.zeros(2, dtype=torch.float64)
    dist.reduce_scatter_tensor(out, own(rank, 2 * size))
    return out


@case
def all_to_all(rank: int, size: int) -> Any:
    even = torch.zeros(2 * size, dtype=torch.float64)
    dist.all_to_all_single(even, own(rank, 2 * size))
    sizes = [other + 1 for other in range(size)]  # this rank sends so many to each, and gets rank + 1 of each
    uneven = torch.zeros((rank + 1) * size, dtype=torch.float64)
    dist.all_to_all_single(uneven, own(rank, sum(sizes)), [rank + 1] * size, sizes)
    return [even, uneven]


@case
def gather_and_scatter(rank: int, size: int) -> Any:
    root = size - 1
    rows = [torch.zeros(3, dtype=torch.float64) for _ in range(size)] if rank == root else None
    dist.gather(own(rank, 3), rows, dst=root)
    out = torch.zeros(2, dtype=torch.float64)
    dist.scatter(out, [own(other + 5, 2) for other in range(size)] if rank == root else None, src=root)
    return [rows, out]


@case
def objects(rank: int, size: int) -> Any:
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * (rank + 1)})
    rows: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(("of", rank), rows, dst=0)
    shared: list[Any] = [rank, f"of {rank}"]
    dist.broadcast_object_list(shared, src=size - 1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [[other] for other in range(size)] if rank == 0 else None, src=0)
    return [everything, rows, shared, mine]


@case
def messages(rank: int, size: int) -> Any:
    to, by = (rank + 1) % size, (rank - 1) % size
    out, later = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    sent = [dist.isend(own(rank, 2), to, tag=1), dist.isend(own(rank + 100, 2), to, tag=2)]
    second, first = dist.irecv(later, by, tag=2), dist.irecv(out, by, tag=1)
    for work in (second, first, *sent):
        work.wait()
    either = torch.zeros(2, dtype=torch.float64)
    pairs = [dist.P2POp(dist.isend, own(rank, 2) * 3, to), dist.P2POp(dist.irecv, either, by)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    found = [out, later, either]
    if rank == 0:
        anybodys = torch.zeros(1, dtype=torch.float64)
        found.append(sorted((dist.recv(anybodys), float(anybodys)) for _ in range(size - 1)))
    else:
        dist.send(torch.tensor([float(rank)], dtype=torch.float64), 0)
    return found


@case
def order_of_messages(rank: int, size: int) -> Any:
    if rank == 0:
        for number in range(3):
            dist.send(torch.tensor([float(number)]), size - 1)
    found = [torch.zeros(1) for _ in range(3)]
    if rank == size - 1:
        for tensor in found:
            dist.recv(tensor, 0)
    return found


@case
def handles(rank: int, size: int) -> Any:
    """Waited for in another order than they were begun."""
    tensors = [own(rank, 2) + number for number in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    return tensors


@case
def futures(rank: int, size: int) -> Any:
    tensor = own(rank, 2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: [each * 2 for each in done.value()]).wait()


@case
def groups(rank: int, size: int) -> Any:
    last_two = dist.new_group([size - 2, size - 1])
    each_alone = [dist.new_group([other]) for other in range(size)]
    tensor, root = own(rank, 2), own(rank, 2)
    if rank >= size - 2:
        dist.all_reduce(tensor, group=last_two)
        dist.broadcast(root, src=size - 1, group=last_two)
        dist.barrier(last_two)
    single = own(rank, 2)
    dist.all_reduce(single, group=each_alone[rank])
    return [tensor, root, single, dist.get_rank(last_two), dist.get_process_group_ranks(each_alone[rank])]


@case
def barriers(rank: int, size: int) -> Any:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    return dist.get_backend()


@case
def functional_collectives(rank: int, size: int) -> Any:
    group = dist.group.WORLD
    total = functional.all_reduce(own(rank, 2), "sum", group)
    rows = functional.all_gather_tensor(own(rank, 2), 0, group)
    part = functional.reduce_scatter_tensor(own(rank, size), "sum", 0, group)
    swapped = functional.all_to_all_single(own(rank, size), None, None, group)
    return [functional.wait_tensor(each) for each in (total, rows, part, swapped)]


@case
def divided_tensors(rank: int, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = own(7, 2 * size + 1, 3)
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    product = parts @ distribute_tensor(own(1, 3, 2), mesh, [Replicate()])
    return [
        parts.to_local(),
        product.full_tensor(),
        parts.redistribute(mesh, [Shard(1)]).to_local(),
        parts.sum().full_tensor(),
    ]


@case
def stores(rank: int, size: int) -> Any:
    store = dist.PrefixStore("of a test", dist.distributed_c10d._get_default_store())
    store.set(f"key {rank}", f"text {rank}")
    texts = [store.get(f"key {other}") for other in range(size)]
    count = store.add("count", rank + 1)
    dist.barrier()
    found = [texts, store.add("count", 0), store.check(["key 0", "none"]), store.check(["key 0"])]
    dist.barrier()
    if rank == 0:
        found += [store.compare_set("key 0", "other", "new"), store.compare_set("key 0", "text 0", "new")]
        found.append(store.delete_key("key 0"))
    return [found, count > 0]


def all_results() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {name: function(rank, size) for name, function in RESULTS.items()}
