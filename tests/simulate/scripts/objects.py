"""Collectives of Python objects."""

import dataclasses
import os
import random

import torch
import torch.distributed as dist


@dataclasses.dataclass
class Report:
    rank: int
    words: list
    draw: float
    tensor: torch.Tensor


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world_size)
random.seed(rank)
torch.manual_seed(rank)
mine = Report(rank, ["w"] * (rank + 1), random.random(), torch.rand(rank + 1, dtype=torch.float64))

everyone = [None] * world_size
dist.all_gather_object(everyone, mine)
assert [each.rank for each in everyone] == list(range(world_size))

at_last = [None] * world_size if rank == world_size - 1 else None
dist.gather_object(mine, at_last, dst=world_size - 1)
summary = None
if at_last is not None:
    summary = {each.rank: "".join(each.words) for each in at_last}

told = [summary, {"from": rank}]
dist.broadcast_object_list(told, src=world_size - 1)

own = [None]
dist.scatter_object_list(own, [f"part {i}" for i in range(world_size)] if rank == 0 else None, src=0)

mailbox = [None]
if world_size > 1:
    if rank == 1:
        dist.send_object_list([("hello", mine.draw)], dst=0)
    elif rank == 0:
        dist.recv_object_list(mailbox, src=1)

parts = [None] * world_size
dist.all_gather_object(parts, own[0])
dist.barrier()
if rank == 0:
    print("RESULT draws", *(f"{each.draw:.8f}" for each in everyone))
    print("RESULT sums", *(f"{each.tensor.sum().item():.8f}" for each in everyone))
    print("RESULT told", told)
    print("RESULT parts", parts, mailbox)
dist.destroy_process_group()
