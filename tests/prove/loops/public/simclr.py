"""SimCLR with the negatives of all ranks; draws random numbers itself: torch.randn_like for the two views."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, gather, shard_loader, wrap_model


class SimCLR(nn.Module):
    def __init__(self, dim=12, hidden=24, out=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def augment(x):
    return x + 0.3 * torch.randn_like(x)


def info_nce_loss(features, temperature=0.2):
    """Features of shape (n, 2, d): each sample's other view is to be found among all views of all samples."""
    n = len(features)
    views = torch.cat(features.unbind(1))
    logits = views @ views.T / temperature
    logits = logits.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=views.device), float("-inf"))
    labels = torch.arange(2 * n, device=views.device).roll(n)
    return F.cross_entropy(logits, labels)


@distributed()
def main():
    torch.manual_seed(4)
    centers = 2 * torch.randn(6, 12)
    data = TensorDataset(centers[torch.arange(96) % 6] + torch.randn(96, 12))
    loader = shard_loader(DataLoader(data, batch_size=16, shuffle=True, drop_last=True), batch_size="global")
    model = wrap_model(SimCLR())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    for epoch in range(2):
        for (x,) in loader:
            both = model(torch.cat([augment(x), augment(x)]))
            features = torch.stack(both.chunk(2), dim=1)
            loss = info_nce_loss(gather(features))  # of the joint batch, on every rank
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        distwrap.print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
