"""Cosine schedule with warm restarts, stepped by fractions of an epoch; draws no random numbers in the loop."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, gather, mean, optimizer_step, shard_loader, wrap_model


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.block(x)


@distributed()
def main():
    torch.manual_seed(0)
    x = torch.randn(141, 10)
    y = (x[:, :5] * x[:, 5:]).argmax(1)
    train_loader = shard_loader(DataLoader(TensorDataset(x[:96], y[:96]), batch_size=8, shuffle=True, drop_last=True))
    test_loader = shard_loader(DataLoader(TensorDataset(x[96:], y[96:]), batch_size=16))
    model = wrap_model(nn.Sequential(nn.Linear(10, 24), Residual(24), Residual(24), nn.Linear(24, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=1, eta_min=1e-4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    iters = len(train_loader)
    for epoch in range(2):
        model.train()
        for i, (inputs, targets) in enumerate(train_loader):
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer_step(optimizer, max_norm=2.0)
            scheduler.step(epoch + (i + 1) / iters)
        model.eval()
        with torch.no_grad():
            hits = gather(torch.cat([model(inputs).argmax(1) == targets for inputs, targets in test_loader]))
        loss = mean(loss.item(), len(inputs))
        distwrap.print(f"epoch {epoch}: loss {loss:.4f}, lr {scheduler.get_last_lr()[0]:.4f}, {hits.sum().item()} of {len(hits)}")


if __name__ == "__main__":
    main()
