import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from distwrap import distributed, mean, shard_loader, wrap_model


class Mixed(Dataset):
    """Each sample comes with its partner, and with the weight of the two."""

    def __init__(self, n=144, classes=3):
        g = torch.Generator().manual_seed(37)
        self.labels = torch.randint(classes, (n,), generator=g)
        self.x = F.one_hot(self.labels, classes).float() @ torch.randn(classes, 8, generator=g)
        self.x += torch.randn(n, 8, generator=g)
        self.partner = torch.randperm(n, generator=g)
        self.weight = 0.5 + 0.5 * torch.rand(n, 1, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        j = self.partner[i]
        return self.x[i], self.labels[i], self.x[j], self.labels[j], self.weight[i]


@distributed(seed=0)
def main():
    loader = shard_loader(DataLoader(Mixed(), batch_size=16), batch_size="global")
    model = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    model = wrap_model(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.8)
    for epoch in range(2):
        for x, y, x2, y2, w in loader:
            logits = model(w * x + (1 - w) * x2)
            first = F.cross_entropy(logits, y, reduction="none")
            second = F.cross_entropy(logits, y2, reduction="none")
            w = w.squeeze(1)
            loss = (w * first + (1 - w) * second).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    return mean(loss.item(), len(x))


if __name__ == "__main__":
    print("loss", f"{main():.6f}")
