"""DDPM of points on a spiral; draws random numbers itself: torch.randint for the times, torch.randn_like for the noise."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, mean, rank_generator, shard_loader, wrap_model

TIMESTEPS = 20


class NoisePredictor(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, hidden)
        self.inp, self.mid, self.out = nn.Linear(2, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def forward(self, x, t):
        return self.out(F.silu(self.mid(F.silu(self.inp(x) + self.time(t)))))


class NoiseScheduler:
    def __init__(self, beta_start=1e-4, beta_end=0.2):
        self.betas = torch.linspace(beta_start, beta_end, TIMESTEPS)
        self.alphas_cumprod = torch.cumprod(1 - self.betas, dim=0)

    def add_noise(self, x, noise, t):
        a = self.alphas_cumprod.to(x.device)[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * noise


@distributed()
def main():
    torch.manual_seed(0)
    angle = 6 * torch.rand(128)
    data = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * angle.unsqueeze(1) / 3)
    loader = shard_loader(DataLoader(data, batch_size=16, shuffle=True))
    model, scheduler = wrap_model(NoisePredictor()), NoiseScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    times = rank_generator(0, distwrap.device())  # each rank has times of its own
    for epoch in range(2):
        for (x,) in loader:
            noise = torch.randn_like(x)
            t = torch.randint(0, TIMESTEPS, (len(x),), device=x.device, generator=times)
            loss = F.mse_loss(model(scheduler.add_noise(x, noise, t), t), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        distwrap.print(f"epoch {epoch}: loss {mean(loss.item(), len(x)):.4f}")


if __name__ == "__main__":
    main()
