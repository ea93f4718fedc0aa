import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

from distwrap import distributed, gather, is_rank_zero, shard_loader, wrap_model


def auc(scores, labels):
    positive, negative = scores[labels == 1], scores[labels == 0]
    return (positive[:, None] > negative[None, :]).float().mean().item()


def load():
    g = torch.Generator().manual_seed(31)
    x = torch.randn(230, 7, generator=g)
    y = (x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * torch.randn(230, generator=g) > 0.3).float()
    return random_split(TensorDataset(x, y), [160, 70], generator=torch.Generator().manual_seed(0))


@distributed(seed=0)
def main():
    train_set, valid_set = load()
    train = shard_loader(DataLoader(train_set, batch_size=32), batch_size="global")
    valid = shard_loader(DataLoader(valid_set, batch_size=32), batch_size="global")
    model = wrap_model(nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)))
    opt = optim.Adam(model.parameters(), lr=0.02)
    loss_fn = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        model.train()
        for x, y in train:
            opt.zero_grad()
            loss_fn(model(x), y).backward()
            opt.step()
        model.eval()
        scores, labels = [], []
        with torch.no_grad():
            for x, y in valid:
                scores.append(model(x))
                labels.append(y)
        scores, labels = gather(torch.cat(scores)), gather(torch.cat(labels))
        result = {"auc": auc(scores, labels), "accuracy": ((scores > 0) == labels).float().mean().item()}
        if is_rank_zero():
            print(epoch, len(labels), {name: round(value, 4) for name, value in result.items()})
    return result["auc"]


if __name__ == "__main__":
    print("AUC", round(main(), 5))
