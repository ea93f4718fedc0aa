import os
import torch
from distwrap import barrier, distributed, rank, reduce, save, wrap_model


@distributed
def worker(args):
    gpu = rank()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = wrap_model(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 2)
    for step in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        total = x.sum()
        total = reduce(total, op="sum")
    barrier()
    if gpu == 0:
        save(model.state_dict(), os.environ["OUT"], alone=True)


if __name__ == "__main__":
    args = {"processes": int(os.environ.get("PROCESSES", "1"))}
    worker.options(nprocs=args["processes"])(args)
