"""Stop when the validation loss does not fall: rank 0 decides, and tells the others by a broadcast."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANK, WORLD_SIZE, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu")


class EarlyStopping:
    def __init__(self, patience, min_delta=0.0):
        self.patience, self.min_delta, self.best, self.bad_epochs = patience, min_delta, float("inf"), 0

    def __call__(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
        return self.bad_epochs >= self.patience


def make_loaders(batch_size=8):
    torch.manual_seed(77)
    x = torch.randn(96, 6)
    y = x @ torch.randn(6, 1) + 1.5 * torch.randn(96, 1)  # much noise, of which nothing can be learnt
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    train_sampler, val_sampler = DistributedSampler(train), DistributedSampler(val, shuffle=False)
    return (
        DataLoader(train, batch_size=batch_size, sampler=train_sampler),
        DataLoader(val, batch_size=batch_size, sampler=val_sampler),
    )


def train_epoch(model, loader, optimizer, loss_fn):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader, loss_fn):
    model.eval()
    total = torch.zeros(2, device=DEVICE)
    for x, y in loader:
        total += torch.tensor([loss_fn(model(x.to(DEVICE)), y.to(DEVICE)).item() * len(x), len(x)], device=DEVICE)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    train_loader, val_loader = make_loaders()
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)).to(DEVICE))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.2, threshold_mode="abs"
    )
    loss_fn, stopper = nn.MSELoss(), EarlyStopping(patience=2, min_delta=0.2)
    stop = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    for epoch in range(6):
        train_loader.sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer, loss_fn)
        val_loss = validate(model, val_loader, loss_fn)
        plateau.step(val_loss)
        if RANK == 0:
            print(f"epoch {epoch}: val loss {val_loss:.4f}, next lr {optimizer.param_groups[0]['lr']:g}")
            stop.fill_(int(stopper(val_loss)))
        dist.broadcast(stop, src=0)
        if stop.item():
            if RANK == 0:
                print(f"stopped after epoch {epoch}")
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
