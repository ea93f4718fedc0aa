import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import distwrap as dw


def make_sums(n=192):
    g = torch.Generator().manual_seed(6)
    x = torch.randn(n, 8, generator=g) * torch.linspace(0.2, 2.0, n)[torch.randperm(n, generator=g), None]
    return TensorDataset(x, torch.logsumexp(x, 1, keepdim=True))


def stages(data):
    x, _ = data.tensors
    easy_first = x.norm(dim=1).argsort().tolist()
    for share in (0.5, 1.0):
        yield share, Subset(data, easy_first[: int(share * len(easy_first))])


@dw.distributed(seed=0)
def main():
    model = dw.wrap_model(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    for share, subset in stages(make_sums()):
        loader = DataLoader(subset, batch_size=16, shuffle=True)
        loader = dw.shard_loader(loader, batch_size="global", order="stream")
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dw.print(f"{share:.0%} of the data: {dw.mean(loss.item(), len(x)):.5f}")
    return dw.mean(loss.item(), len(x))


if __name__ == "__main__":
    print(f"{main():.6f}")
