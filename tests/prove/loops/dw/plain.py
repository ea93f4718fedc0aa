import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import distributed, mean, shard_loader, wrap_model


def make_data():
    numbers = torch.Generator().manual_seed(7)
    x = torch.randn(200, 8, generator=numbers)
    y = x[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(200, 1, generator=numbers)
    return TensorDataset(x, y)


@distributed(seed=0)
def main():
    model = wrap_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = shard_loader(DataLoader(make_data(), batch_size=16, shuffle=True))
    criterion = nn.MSELoss()

    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()

    return mean(loss.item(), len(x))


if __name__ == "__main__":
    print(f"loss {main():.6f}")
