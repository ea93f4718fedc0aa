"""Train a small network by ignite's trainer, on two processes."""

import sys

import torch
import torch.nn.functional as F
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import device, distributed, save, shard_loader, wrap_model


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


@distributed(nprocs=2, seed=0)
def training(path):
    model = wrap_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shard_loader(DataLoader(make_data(), batch_size=32, shuffle=True), batch_size="global")
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, device=device())
    trainer.run(loader, max_epochs=3)
    save(model, path)


if __name__ == "__main__":
    training(sys.argv[1])
