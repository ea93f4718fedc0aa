import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6))
        self.text = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.scale.exp()


def clip_loss(a, b, scale):
    a, b = dw.gather(a), dw.gather(b)
    logits = scale * a @ b.T
    targets = torch.arange(len(logits))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


@dw.distributed(seed=2)
def main():
    g = torch.Generator().manual_seed(13)
    hidden = torch.randn(160, 4, generator=g)
    images = hidden @ torch.randn(4, 12, generator=g) + 0.2 * torch.randn(160, 12, generator=g)
    texts = hidden @ torch.randn(4, 9, generator=g) + 0.2 * torch.randn(160, 9, generator=g)
    loader = DataLoader(TensorDataset(images, texts), batch_size=16, shuffle=True, drop_last=True)
    loader = dw.shard_loader(loader, batch_size="global", order="stream")

    model = dw.wrap_model(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for a, b in loader:
            loss = clip_loss(*model(a, b))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print("contrastive loss: %.6f" % main())
