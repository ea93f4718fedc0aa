"""Train a small network on two processes."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import backward, distributed, optimizer_step, save, shard_loader, wrap_model, wrap_optimizer


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


@distributed(nprocs=2, seed=0)
def main(path):
    model = wrap_model(make_model())
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = shard_loader(DataLoader(make_data(), batch_size=16, shuffle=True))
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            backward(loss)
            optimizer_step(optimizer)
    save(model, path)


if __name__ == "__main__":
    main(sys.argv[1])
