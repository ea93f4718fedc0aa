"""The state of Adam is divided among the ranks by ZeroRedundancyOptimizer, the rest is plain DDP."""

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_PER_RANK = 2, 8


def make_autoencoder():
    return nn.Sequential(
        nn.Linear(20, 16),
        nn.ReLU(),
        nn.Linear(16, 6),  # encoder
        nn.Linear(6, 16),
        nn.ReLU(),
        nn.Linear(16, 20),  # decoder
    )


def load(size=96):
    g = torch.Generator().manual_seed(21)
    return TensorDataset(torch.randn(size, 3, generator=g) @ torch.randn(3, 20, generator=g))


def example(rank, world_size):
    torch.manual_seed(0)
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    ddp_model = DDP(make_autoencoder().to(device))
    loss_fn = nn.MSELoss()
    optimizer = ZeroRedundancyOptimizer(ddp_model.parameters(), optimizer_class=optim.Adam, lr=0.01)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    dataset = load()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=BATCH_PER_RANK, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(1, device=device)
        for step, (rows,) in enumerate(loader):
            rows = rows.to(device)
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(rows), rows)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.detach()
        scheduler.step()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch} loss {epoch_loss.item() / (len(loader) * world_size):.4f}")

    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()
        print(f"state of {len(state['state'])} parameters, lr {state['param_groups'][0]['lr']:.5f}")
    dist.barrier()


def main():
    dist.init_process_group("gloo", init_method="env://")
    example(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
