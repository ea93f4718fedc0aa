"""WGAN-GP, whose critic has a penalty on its gradients; draws random numbers itself: codes, and where to take the penalty."""
import torch
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, reduce, seed_everything, shard_loader, wrap_model

LAMBDA, CRITIC_ITERS, LATENT = 10.0, 2, 3


def compute_gradient_penalty(critic, real, fake):
    alpha = torch.rand(len(real), 1, device=real.device)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(interpolates)
    gradients = autograd.grad(
        outputs=scores, inputs=interpolates, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


@distributed()
def main():
    torch.manual_seed(6)
    data = TensorDataset(torch.randn(128, 2) * torch.tensor([2.0, 0.3]) + 1)
    loader = shard_loader(DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
    generator = wrap_model(nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, 2)))
    critic = wrap_model(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_C = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    seed_everything(7, apart=True)  # from here on each rank draws numbers of its own
    for epoch in range(1):
        for i, (real,) in enumerate(loader):
            z = torch.randn(len(real), LATENT, device=real.device)
            with torch.no_grad():
                fake = generator(z)
            penalty = compute_gradient_penalty(critic, real, fake)
            loss_C = critic(fake).mean() - critic(real).mean() + LAMBDA * penalty
            optimizer_C.zero_grad()
            loss_C.backward()
            optimizer_C.step()
            if (i + 1) % CRITIC_ITERS == 0:
                loss_G = -critic(generator(z)).mean()
                optimizer_G.zero_grad()
                loss_G.backward()
                optimizer_G.step()
        losses = reduce({"critic": loss_C.item(), "generator": loss_G.item()})
        distwrap.print(f"epoch {epoch}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))


if __name__ == "__main__":
    main()
