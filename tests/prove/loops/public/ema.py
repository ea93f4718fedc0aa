"""EMA of the weights, which is what is evaluated; draws no random numbers in the loop."""
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, reduce, shard_loader, unwrap_model, wrap_model


class ModelEMA:
    """A copy of the model whose weights follow it slowly, with a decay that grows in the beginning."""

    def __init__(self, model, decay=0.99):
        self.module, self.decay, self.updates = copy.deepcopy(model).eval().requires_grad_(False), decay, 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for ema, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema.lerp_(value, 1 - decay)


@torch.no_grad()
def validate(model, loader):
    total = count = 0
    for x, y in loader:
        total += nn.functional.l1_loss(model(x), y, reduction="sum").item()
        count += y.numel()
    total, count = reduce([total, count], "sum")
    return total / count


@distributed()
def main():
    torch.manual_seed(15)
    x = torch.randn(174, 6)
    y = torch.tanh(x @ torch.randn(6, 2))
    loader = shard_loader(DataLoader(TensorDataset(x[:128], y[:128]), batch_size=8, shuffle=True))
    val_loader = shard_loader(DataLoader(TensorDataset(x[128:], y[128:]), batch_size=16))
    model = wrap_model(nn.Sequential(nn.Linear(6, 24), nn.Mish(), nn.Linear(24, 2)))
    ema = ModelEMA(unwrap_model(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for epoch in range(2):
        for inputs, targets in loader:
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(unwrap_model(model))
        distwrap.print(f"epoch {epoch}: {validate(model, val_loader):.4f}, averaged {validate(ema.module, val_loader):.4f}")


if __name__ == "__main__":
    main()
