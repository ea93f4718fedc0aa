"""VAE with the losses summed and divided by the batch; draws random numbers itself: torch.randn_like for the codes."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, reduce, shard_loader, wrap_model


class VAE(nn.Module):
    def __init__(self, pixels=36, hidden=24, code=3):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, hidden), nn.Linear(hidden, code), nn.Linear(hidden, code)
        self.fc3, self.fc4 = nn.Linear(code, hidden), nn.Linear(hidden, pixels)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h1 = F.relu(self.fc1(x.flatten(1)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.flatten(1), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def make_data(n=128):
    bars = torch.rand(n, 1, 6) > 0.6
    return TensorDataset((bars | (torch.rand(n, 6, 1) > 0.7)).float())


@distributed()
def main():
    torch.manual_seed(1)
    train_loader = shard_loader(DataLoader(make_data(), batch_size=16, shuffle=True))
    model = wrap_model(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        train_loss, samples = 0.0, 0
        for (data,) in train_loader:
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            (loss / len(data)).backward()
            train_loss, samples = train_loss + loss.item(), samples + len(data)
            optimizer.step()
        train_loss, samples = reduce([train_loss, samples], "sum")
        distwrap.print(f"====> Epoch: {epoch} Average loss: {train_loss / samples:.4f}")


if __name__ == "__main__":
    main()
