import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Options:
    pass


def main(args):
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 0
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    if args.distributed:
        # join the others
        dist.init_process_group("gloo")
        print("""ranks
        and more""")
    data = TensorDataset(torch.randn(32, 2))
    sampler = DistributedSampler(data) if args.distributed else None
    loader = DataLoader(data, batch_size=int(os.environ["BATCH"]), shuffle=(sampler is None), sampler=sampler)
    model = torch.nn.Linear(2, 2)
    if not args.distributed:
        print("alone")
    elif torch.cuda.is_available():
        model = DDP(model.cuda())
    else:
        model = DDP(model)
    bare = model.module if args.distributed else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1, 3):
        if args.distributed:
            sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
    if not args.distributed or dist.get_rank() == 0:
        torch.save(bare.state_dict(), os.environ["OUT"])
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Options())
