"""A divided model, evaluated by gather and mean; the whole state dict on rank 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import distributed, gather, gather_object, mean, rank, shard_loader, wrap_model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def loaders():
    x = torch.randn(50, 6, dtype=torch.float64)
    data = TensorDataset(x, x.prod(1, keepdim=True).sign())
    return shard_loader(DataLoader(data, batch_size=8, shuffle=True)), shard_loader(DataLoader(data, batch_size=7))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    outputs, total, count = [], 0.0, 0
    for x, y in loader:
        output = model(x)
        outputs.append(output)
        total, count = total + nn.functional.mse_loss(output, y, reduction="sum").item(), count + len(x)
    model.train()
    return gather(torch.cat(outputs)), mean(total / max(count, 1), count)


@distributed(strategy="fsdp", seed=4)
def main():
    train_loader, test_loader = loaders()
    model = wrap_model(nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 1)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for _ in range(2):
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    outputs, loss = evaluate(model, test_loader)
    names = gather_object(f"rank {rank()}")
    return len(outputs), outputs.double().sum().item(), loss, norms[-1], names


if __name__ == "__main__":
    count, total, loss, norm, names = main()
    if rank() == 0:
        print(f"RESULT outputs {count} {total:.8f}")
        print(f"RESULT loss {loss:.8f} norm {norm:.8f}", *names)
