import os
import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel


def worker(gpu, args):
    dist.init_process_group(backend="gloo", init_method="tcp://127.0.0.1:29574", world_size=args["processes"], rank=gpu)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 2)
    for step in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        total = x.sum()
        dist.all_reduce(total)
    dist.barrier()
    if gpu == 0:
        torch.save(model.module.state_dict(), os.environ["OUT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    args = {"processes": int(os.environ.get("PROCESSES", "1"))}
    spawn(worker, nprocs=args["processes"], args=(args,))
