import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import save, setup_process_group, shard_loader, wrap_model


def build(width):
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    return net


def train(net, loader):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    setup_process_group()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    loader = shard_loader(DataLoader(TensorDataset(x, x[:, :1]), batch_size=int(os.environ["BATCH"])), batch_size="global")
    net = build(4).to("cuda" if torch.cuda.is_available() else "cpu")
    net = wrap_model(net)
    train(net, loader)
    save(net.state_dict(), os.environ["OUT"])
