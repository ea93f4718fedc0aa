"""A GAN with two DDP models, one of which has buffers."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def generator_net(latent):
    return nn.Sequential(nn.Linear(latent, 12), nn.BatchNorm1d(12), nn.ReLU(True), nn.Linear(12, 2), nn.Tanh())


def discriminator_net():
    return nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(11)
LATENT, BATCH = 3, 4
netG = DDP(generator_net(LATENT))
netD = DDP(discriminator_net(), broadcast_buffers=False)
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))
torch.manual_seed(500 + rank)
fixed_noise = torch.ones(5, LATENT)

for _step in range(5):
    real = torch.randn(BATCH, 2) * 0.1 + torch.tensor([0.5, -0.5])
    optimizerD.zero_grad()
    errD_real = criterion(netD(real), torch.ones(BATCH, 1))
    errD_real.backward()
    fake = netG(torch.randn(BATCH, LATENT))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(BATCH, 1))
    errD_fake.backward()
    optimizerD.step()

    optimizerG.zero_grad()
    for p in netD.parameters():
        p.requires_grad_(False)
    errG = criterion(netD.module(fake), torch.ones(BATCH, 1))
    errG.backward()
    for p in netD.parameters():
        p.requires_grad_(True)
    optimizerG.step()
losses = torch.stack([errD_real.detach(), errD_fake.detach(), errG.detach()])
dist.all_reduce(losses)
losses /= dist.get_world_size()
netG.eval()
with torch.no_grad():
    image = netG.module(fixed_noise).mean(0)
if rank == 0:
    print("RESULT losses", *(f"{loss:.8f}" for loss in losses.tolist()))
    print("RESULT image", *(f"{value:.8f}" for value in image.tolist()))
    print("RESULT mean", f"{netG.module[1].running_mean.abs().sum().item():.8f}")
dist.destroy_process_group()
