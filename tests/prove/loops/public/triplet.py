"""Siamese network with a triplet loss, its triplets made beforehand; draws no random numbers in the loop."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distwrap
from distwrap import distributed, gather, mean, shard_loader, wrap_model


class Triplets(Dataset):
    """For each sample another one of its class, and one of another class."""

    def __init__(self, n=96, classes=4):
        self.labels = torch.arange(n) % classes
        self.samples = torch.randn(classes, 10)[self.labels] + 1.5 * torch.randn(n, 10)
        steps = classes * torch.randint(1, n // classes, (n,))
        self.positives = (torch.arange(n) + steps) % n
        self.negatives = (torch.arange(n) + steps + torch.randint(1, classes, (n,))) % n

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"anchor": self.samples[i], "positive": self.samples[self.positives[i]], "negative": self.samples[self.negatives[i]]}


class TripletNet(nn.Module):
    def __init__(self, embedding_net):
        super().__init__()
        self.embedding_net = embedding_net

    def forward(self, *inputs):
        return tuple(F.normalize(self.embedding_net(x), dim=-1) for x in inputs)


@distributed()
def main():
    torch.manual_seed(9)
    loader = shard_loader(DataLoader(Triplets(), batch_size=8, shuffle=True))
    model = wrap_model(TripletNet(nn.Sequential(nn.Linear(10, 24), nn.PReLU(), nn.Linear(24, 4))))
    criterion = nn.TripletMarginLoss(margin=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(1):
        for batch in loader:
            anchor, positive, negative = model(batch["anchor"], batch["positive"], batch["negative"])
            loss = criterion(anchor, positive, negative)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = gather((anchor - positive).norm(dim=1) < (anchor - negative).norm(dim=1)).float().mean().item()
        distwrap.print(f"epoch {epoch}: loss {mean(loss.item(), len(anchor)):.4f}, {right:.4f} of the last are right")


if __name__ == "__main__":
    main()
