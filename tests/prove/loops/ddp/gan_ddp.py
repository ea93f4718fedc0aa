"""A GAN of two small networks, each in its own DDP; the latent codes are drawn once, one for each real sample."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NZ, NGF, EPOCHS, BATCH = 4, 16, 2, 8


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), torch.device("cuda", torch.cuda.current_device())


def run():
    rank, device = setup()
    torch.manual_seed(999)
    angle = torch.rand(128) * 6.2832
    real_points = torch.stack([angle.cos(), angle.sin()], dim=1)
    dataset = TensorDataset(real_points, torch.randn(128, NZ))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)

    netG = nn.Sequential(nn.Linear(NZ, NGF), nn.ReLU(), nn.Linear(NGF, 2)).to(device)
    netD = nn.Sequential(nn.Linear(2, NGF), nn.LeakyReLU(0.2), nn.Linear(NGF, 1)).to(device)
    netG, netD = DDP(netG, device_ids=[device]), DDP(netD, device_ids=[device])
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        totals = torch.zeros(3, device=device)
        for real, noise in loader:
            real, noise = real.to(device), noise.to(device)
            ones, zeros = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)

            # (1) the discriminator: real ones up, fakes down, in one backward
            for p in netD.parameters():
                p.requires_grad_(True)
            fake = netG(noise)
            errD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
            optimizerD.zero_grad()
            errD.backward()
            optimizerD.step()

            # (2) the generator: the discriminator shall take its fakes for real
            for p in netD.parameters():
                p.requires_grad_(False)
            errG = criterion(netD.module(fake), ones)  # it has nothing to train here
            optimizerG.zero_grad()
            errG.backward()
            optimizerG.step()
            totals += torch.stack([errD.detach(), errG.detach(), torch.ones((), device=device)])

        dist.all_reduce(totals)
        if rank == 0:
            print(f"[{epoch + 1}/{EPOCHS}] Loss_D: {totals[0] / totals[2]:.4f} Loss_G: {totals[1] / totals[2]:.4f}")

    with torch.no_grad():
        fixed = torch.randn(64, NZ, generator=torch.Generator().manual_seed(4)).to(device)
        radius = netG.module(fixed).norm(dim=1).mean()
    if rank == 0:
        print(f"radius of the fakes {radius.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
