import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from distwrap import distributed, mean, shard_loader, wrap_model


def readings(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    state = torch.zeros(3)
    for _ in range(count):
        state = 0.8 * state + torch.randn(3, generator=g)
        yield state.clone()


class Pairs(IterableDataset):
    """Yields a reading and the one that follows it."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for now, following in itertools.pairwise(readings(self.count + 1)):
            yield now, following


@distributed(seed=0)
def main():
    loader = shard_loader(DataLoader(Pairs(128), batch_size=16), batch_size="global")
    model = wrap_model(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)

    step, losses = 0, []
    for _ in range(2):
        for now, following in loader:
            loss = nn.functional.mse_loss(model(now), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 4 == 0:
                losses.append(mean(loss.item(), len(now)))
    return losses


if __name__ == "__main__":
    print(" ".join(f"{loss:.5f}" for loss in main()))
