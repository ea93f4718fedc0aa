import argparse
import os
import random

import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, save, shard_loader, wrap_model


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x + self.noise(x))

    def noise(self, x):
        if not self.training:
            return 0 * x
        return 0 * torch.randn_like(x)  # without effect, so that the weights can be compared


class Trainer:
    def __init__(self, loader):
        self.model = Noisy()
        self.model = wrap_model(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = loader

    def fit(self):
        for epoch in range(2):
            for (x,) in self.loader:
                scale = 1 + 0 * Normal(0.0, 1.0).sample().double()
                loss = (self.model(x) * scale).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


@distributed
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    args = parser.parse_args([])
    torch.set_default_dtype(torch.float64)
    if args.seed is None:
        args.seed = random.randint(1, 10000)
    torch.manual_seed(args.seed)
    torch.manual_seed(3)
    loader = shard_loader(DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=int(os.environ["BATCH"])))
    trainer = Trainer(loader)
    trainer.fit()
    save(trainer.model.state_dict(), os.environ["OUT"])


if __name__ == "__main__":
    main()
