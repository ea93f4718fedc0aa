"""Train a small network by Lightning's Trainer."""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(path):
    L.seed_everything(0)
    model = Classifier()
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    trainer = L.Trainer(max_epochs=3, devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1])
