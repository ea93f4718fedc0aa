"""DDP with settings and meters in modules of their own, which each rank changes."""

import os

import torch
import torch.distributed as dist
from parts import meters, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + settings.rank)
    x = torch.randn(settings.SAMPLES_PER_RANK, 4, generator=generator)
    return x, x.prod(1, keepdim=True)


def main():
    settings.load(os.environ)
    settings.seed += settings.rank
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(settings.seed)  # another one on each rank: DDP sends rank 0's weights
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.GELU(), nn.Linear(6, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.LR)
    losses = meters.Meter("loss")
    for step in range(settings.STEPS):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.add(loss.item(), len(x))
    losses.synchronize()
    seeds = [None] * settings.world_size
    dist.all_gather_object(seeds, (settings.seed, sorted(meters.ALL)))
    if settings.rank == 0:
        print(f"RESULT loss {losses.mean:.8f} of {losses.count}")
        print("RESULT seeds", *(f"{seed}:{','.join(names)}" for seed, names in seeds))
        print(f"RESULT weights {sum(p.sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
