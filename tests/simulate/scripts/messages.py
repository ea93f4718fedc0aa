"""Messages: a ring of send and recv, a ring by batch_isend_irecv, tags, and all_to_all with different sizes."""

import torch
import torch.distributed as dist


def ring_sum(x, rank, size):
    """A ring all-reduce as in the tutorials."""
    total, passed = x.clone(), x.clone()
    for _ in range(size - 1):
        received = torch.empty_like(x)
        request = dist.isend(passed, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        request.wait()
        total += received
        passed = received
    return total


def exchange(x, rank, size):
    got = torch.empty_like(x)
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return got


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4, dtype=torch.float64) * (rank + 1)
    total = ring_sum(x, rank, size)
    rolled = exchange(x, rank, size) if size > 1 else x
    order = []
    if size > 1 and rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        dist.recv(second, 1, tag=2)
        dist.recv(first, 1, tag=1)
        order = [first.item(), second.item()]
        anyone = torch.zeros(1)
        senders = sorted((dist.recv(anyone), anyone.item()) for _ in range(size - 1))
        order += senders
    elif rank > 0:
        if rank == 1:
            requests = [dist.isend(torch.tensor([10.0 * tag]), 0, tag=tag) for tag in (1, 2)]
            [request.wait() for request in requests]
        dist.send(torch.tensor([float(rank)]), 0)
    sizes = [i + 1 for i in range(size)]  # to rank i
    mine = torch.full((sum(sizes),), float(rank), dtype=torch.float64)
    got = torch.empty(size * (rank + 1), dtype=torch.float64)
    dist.all_to_all_single(got, mine, [rank + 1] * size, sizes)
    everyone = [None] * size
    dist.all_gather_object(everyone, (total.tolist(), rolled.tolist(), got.tolist()))
    if rank == 0:
        print("RESULT order", order)
        for number, each in enumerate(everyone):
            print("RESULT", number, *each)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
