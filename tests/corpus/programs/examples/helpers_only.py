"""Use the helpers without the decorator, in a script that a launcher such as torchrun starts.

The same file runs alone, where every helper does nothing, and under torchrun, where it joins the other ranks.

    python examples/helpers_only.py
    torchrun --standalone --nproc-per-node=2 examples/helpers_only.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import mean, rank_zero_only, seed_everything, setup_process_group, shard_loader, world_size, wrap_model

say = rank_zero_only(print)


def main(epochs: int) -> None:
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])

    with setup_process_group():
        seed_everything(0)
        model = wrap_model(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # The global batch is 64 on any number of ranks, so the learning rate needs no change.
        loader = shard_loader(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True), batch_size="global")
        for epoch in range(epochs):
            total, count = 0.0, 0
            for inputs, targets in loader:
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total, count = total + loss.item() * len(inputs), count + len(inputs)
            everywhere = mean(total / count, count)
            say(f"epoch {epoch}: loss {everywhere:.5f} on {world_size()} rank(s)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fit a line with the helpers alone.")
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
