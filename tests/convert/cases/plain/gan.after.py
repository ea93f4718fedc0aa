import os

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, save, shard_loader, wrap_model


@distributed
def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    real = torch.randn(32, 2) + 3
    noise = torch.randn(32, 2)
    loader = shard_loader(DataLoader(TensorDataset(real, noise), batch_size=int(os.environ["BATCH"])))
    netG = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    netD = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    netD = wrap_model(netD)
    optimizerD = optim.SGD(netD.parameters(), lr=0.05)
    netG = wrap_model(netG)
    optimizerG = optim.SGD(netG.parameters(), lr=0.05)
    for epoch in range(2):
        for x, z in loader:
            fake = netG(z)
            optimizerD.zero_grad()
            loss_d = (netD(x) - 1).square().mean() + netD(fake.detach()).square().mean()
            loss_d.backward()
            optimizerD.step()
            optimizerG.zero_grad()
            loss_g = (netD(netG(z)) - 1).square().mean()
            loss_g.backward()
            optimizerG.step()
    save({"g": netG.state_dict(), "d": netD.state_dict()}, os.environ["OUT"])


if __name__ == "__main__":
    main()
