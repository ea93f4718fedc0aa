import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def run(args):
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    torch.manual_seed(args.seed)
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(32, 3))
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=0)
    model = torch.nn.Linear(3, 1).to(device)
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(0, args.epochs):
        sampler.set_epoch(epoch)
        for x, in loader:
            optimizer.zero_grad()
            ddp(x.to(device)).square().mean().backward()
            optimizer.step()
        barrier()
    if is_main_process():
        torch.save(ddp.module.state_dict(), os.environ["OUT"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--batch", type=int, default=int(os.environ["BATCH"]))
    args = parser.parse_args()
    init_process_group(backend="gloo", init_method="env://")
    try:
        run(args)
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main()
