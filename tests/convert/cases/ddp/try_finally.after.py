import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    barrier as distwrap_barrier,
    device as distwrap_device,
    local_rank as distwrap_local_rank,
    rank,
    save,
    setup_process_group,
    shard_loader,
    wrap_model,
)


def is_main_process():
    return not dist.is_initialized() or rank() == 0


def run(args):
    local_rank = distwrap_local_rank()
    if torch.cuda.is_available():
        device = distwrap_device()
    else:
        device = torch.device("cpu")
    torch.manual_seed(args.seed)
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(torch.randn(32, 3))
    loader = shard_loader(DataLoader(data, args.batch, shuffle=True, num_workers=0), seed=args.seed, mode="drop")
    model = torch.nn.Linear(3, 1).to(device)
    ddp = wrap_model(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(0, args.epochs):
        loader.set_epoch(epoch)
        for x, in loader:
            optimizer.zero_grad()
            ddp(x.to(device)).square().mean().backward()
            optimizer.step()
        distwrap_barrier()
    if is_main_process():
        save(ddp.state_dict(), os.environ["OUT"], alone=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--batch", type=int, default=int(os.environ["BATCH"]))
    args = parser.parse_args()
    setup_process_group()
    try:
        run(args)
    finally:
        pass


if __name__ == "__main__":
    main()
