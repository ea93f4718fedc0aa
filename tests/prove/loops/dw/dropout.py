import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import distributed, gather, mean, shard_loader, wrap_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.ReLU())
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.drop(self.body(x)))


@distributed(seed=0)
def main():
    g = torch.Generator().manual_seed(43)
    x = torch.randn(192, 8, generator=g)
    y = (x[:, 0] > x[:, 1]).long()
    train = DataLoader(TensorDataset(x[:128], y[:128]), batch_size=16)
    test = DataLoader(TensorDataset(x[128:], y[128:]), batch_size=32)
    train, test = shard_loader(train, batch_size="global"), shard_loader(test)
    model = wrap_model(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(2):
        model.train()
        for inputs, targets in train:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    final = mean(loss.item(), len(inputs))

    model.eval()
    with torch.no_grad():
        hits = torch.cat([model(inputs).argmax(1) == targets for inputs, targets in test])
    return final, gather(hits).float().mean().item()


if __name__ == "__main__":
    print("loss %.5f, accuracy %.4f" % main())
