"""Train a small network on two processes."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import distributed, save, shard_loader, wrap_model


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@distributed(nprocs=2, seed=0)
def main(path):
    model = wrap_model(Classifier())
    optimizer = model.configure_optimizers()
    loader = shard_loader(DataLoader(make_data(), batch_size=16, shuffle=True))
    for _ in range(3):
        for batch_idx, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = model.training_step(batch, batch_idx)
            loss.backward()
            optimizer.step()
    save(model, path)


if __name__ == "__main__":
    main(sys.argv[1])
