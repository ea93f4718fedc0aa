"""DCGAN on little pictures of crosses; draws random numbers itself: torch.randn for the latent codes."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, rank_generator, reduce, shard_loader, wrap_model

nz, ngf, ndf = 6, 8, 8


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.1)


def make_pictures(n=96):
    pictures = -torch.ones(n, 1, 8, 8)
    for picture, row, column in zip(pictures, torch.randint(8, (n,)), torch.randint(8, (n,))):
        picture[0, row], picture[0, :, column] = 1.0, 1.0
    return TensorDataset(pictures)


@distributed()
def main():
    torch.manual_seed(999)
    dataloader = shard_loader(DataLoader(make_pictures(), batch_size=8, shuffle=True, drop_last=True))
    netG = nn.Sequential(
        nn.ConvTranspose2d(nz, ngf, 4), nn.GroupNorm(2, ngf), nn.ReLU(), nn.ConvTranspose2d(ngf, 1, 4, 2, 1), nn.Tanh()
    )
    netD = nn.Sequential(
        nn.Conv2d(1, ndf, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ndf, 1, 4), nn.Flatten(0)
    )
    netG, netD = wrap_model(netG.apply(weights_init)), wrap_model(netD.apply(weights_init))
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    codes = rank_generator(1, distwrap.device())  # each rank draws its own
    for epoch in range(1):
        for i, (real,) in enumerate(dataloader):
            ones, zeros = torch.ones(len(real), device=real.device), torch.zeros(len(real), device=real.device)
            fake = netG(torch.randn(len(real), nz, 1, 1, device=real.device, generator=codes))
            errD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
            netD.zero_grad()
            errD.backward()
            optimizerD.step()

            errG = criterion(netD(fake), ones)
            netG.zero_grad()
            errG.backward()
            optimizerG.step()
        loss_d, loss_g = reduce([errD.item(), errG.item()])
        distwrap.print(f"[{epoch}] Loss_D: {loss_d:.4f} Loss_G: {loss_g:.4f}")


if __name__ == "__main__":
    main()
