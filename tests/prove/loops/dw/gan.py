import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

bce = nn.functional.binary_cross_entropy_with_logits


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)


@dw.distributed(seed=0)
def main():
    g = torch.Generator().manual_seed(4)
    points = torch.randn(192, 2, generator=g) * 0.3 + torch.tensor([2.0, -1.0])
    noise = torch.randn(192, 4, generator=g)
    loader = dw.shard_loader(DataLoader(TensorDataset(points, noise), batch_size=32), batch_size="global")

    G, D = dw.wrap_model(Generator()), dw.wrap_model(Discriminator())
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-2, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-2, betas=(0.5, 0.999))

    for epoch in range(2):
        for real, z in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = G(z)

            d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()

            g_loss = bce(D(fake), ones)
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
        dw.print(f"epoch {epoch}: D {dw.mean(d_loss.item(), len(real)):.4f}")
    return dw.mean(g_loss.item(), len(real))


if __name__ == "__main__":
    print(f"generator loss {main():.6f}")
