import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank_zero_only, save as distwrap_save, shard_loader, wrap_model

print = rank_zero_only(print)


class Trainer:
    """Trains a model."""

    def __init__(self, model: nn.Module, data, lr: float = 0.1):
        self.model = model
        self.model = wrap_model(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"]), shuffle=False))

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs: int):
        for epoch in range(epochs):
            losses = 0.0
            for x, y in self.loader:
                losses += self.step(x, y)
            print("mean loss", losses / len(self.loader))

    def save(self):
        distwrap_save(self.model.state_dict(), os.environ["OUT"])


@distributed
def run():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    x = torch.randn(32, 3)
    trainer = Trainer(nn.Linear(3, 2), TensorDataset(x, x[:, :2]))
    trainer.fit(3)
    trainer.save()


run()
