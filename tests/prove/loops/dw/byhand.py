import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import distributed, mean, no_sync, shard_loader, wrap_model

ACCUM = 2


@distributed(seed=0)
def main():
    g = torch.Generator().manual_seed(21)
    x = torch.randn(192, 5, generator=g)
    w = torch.randn(5, 2, generator=g)
    dataset = TensorDataset(x, torch.tanh(x @ w))
    loader = shard_loader(DataLoader(dataset, batch_size=16), batch_size="global")

    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))
    net = wrap_model(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    mse = nn.MSELoss()

    opt.zero_grad()
    for epoch in range(2):
        for i, (inputs, targets) in enumerate(loader):
            update = (i + 1) % ACCUM == 0
            with no_sync(net, enabled=not update):
                loss = mse(net(inputs), targets) / ACCUM
                loss.backward()
            if update:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)
                opt.step()
                opt.zero_grad()
    return mean(loss.item() * ACCUM, len(inputs))


if __name__ == "__main__":
    print(f"{main():.6f}")
