import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw


def dataset():
    g = torch.Generator().manual_seed(8)
    x = torch.randn(96, 4, generator=g)
    return TensorDataset(x, (x**2).sum(1, keepdim=True))


def fit(path, epochs):
    loader = DataLoader(dataset(), batch_size=16, shuffle=True)
    loader = dw.shard_loader(loader, batch_size="global", order="stream", seed=1)
    model = dw.wrap_model(nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step) ** -0.5)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    state = dw.resume_from(path, into=objects)
    first, average = (state["epoch"], state["average"]) if state else (0, 1.0)

    for epoch in range(first, epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            (loss / average).backward()
            optimizer.step()
            scheduler.step()
            average = 0.9 * average + 0.1 * dw.mean(loss.item(), len(x))
        dw.save({**objects, "epoch": epoch + 1, "average": average}, path)
    return average


@dw.distributed(seed=0)
def main():
    folder = dw.broadcast(tempfile.mkdtemp() if dw.is_rank_zero() else None)
    path = Path(folder, "last.pt")
    fit(path, epochs=1)
    return fit(path, epochs=2)


if __name__ == "__main__":
    print(f"running loss {main():.6f}")
