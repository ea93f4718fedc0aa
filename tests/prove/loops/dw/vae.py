import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distwrap as dw


class Curves(Dataset):
    def __init__(self, n, latent):
        g = torch.Generator().manual_seed(41)
        t = torch.linspace(0, 1, 16)
        phase, height = torch.rand(n, 1, generator=g), torch.rand(n, 1, generator=g)
        self.x = height * torch.sin(6.28 * (t + phase))
        self.eps = torch.randn(n, latent, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.eps[i]


class VAE(nn.Module):
    def __init__(self, latent=2):
        super().__init__()
        self.encoder = nn.Linear(16, 24)
        self.mu, self.logvar = nn.Linear(24, latent), nn.Linear(24, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, 16))

    def forward(self, x, eps):
        h = F.relu(self.encoder(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + eps * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


@dw.distributed(seed=0)
def main():
    loader = DataLoader(Curves(176, latent=2), batch_size=32, shuffle=True)
    loader = dw.shard_loader(loader, batch_size="global", order="stream")
    model = dw.wrap_model(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for x, eps in loader:
            out, mu, logvar = model(x, eps)
            recon = F.mse_loss(out, x, reduction="sum")
            kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum()
            loss = (recon + 0.1 * kl) / len(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return dw.mean(loss.item(), len(x))


if __name__ == "__main__":
    print(f"ELBO loss {main():.5f}")
