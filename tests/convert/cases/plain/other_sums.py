import os
from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, optimizer, train_loader, val_loader):
        self.model, self.optimizer = model, optimizer
        self.train_loader, self.val_loader = train_loader, val_loader

    def train(self):
        self.seen = 0
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.seen += len(x)

    @torch.no_grad()
    def validate(self):
        self.loss, self.count = 0.0, 0
        for x, y in self.val_loader:
            self.loss += nn.functional.cross_entropy(self.model(x), y, reduction="sum").item()
            self.count += len(y)
        return self.loss / self.count


def confusion_of(model, loader):
    confusion = torch.zeros(3, 3, dtype=torch.long)
    hits = defaultdict(int)
    with torch.no_grad():
        for x, y in loader:
            for t, p in zip(y.tolist(), model(x).argmax(1).tolist()):
                confusion[t, p] += 1
                hits[t] += int(t == p)
    return confusion, dict(hits)


def main():
    torch.manual_seed(0)
    batch = int(os.environ["BATCH"])
    x, y = torch.randn(32, 10, dtype=torch.float64), torch.randint(0, 3, (32,))
    train_loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    val_loader = DataLoader(TensorDataset(x[:18], y[:18]), batch_size=batch)
    test_loader = DataLoader(TensorDataset(x[18:], y[18:]), batch_size=batch)
    model = nn.Linear(10, 3).double()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), train_loader, val_loader)
    for _ in range(2):
        trainer.train()
        val_loss = trainer.validate()
    confusion, hits = confusion_of(model, test_loader)
    numbers = {"val": torch.tensor(val_loss), "confusion": confusion, "hits": torch.tensor(sum(hits.values()))}
    torch.save({"model": model.state_dict(), "numbers": numbers}, os.environ["OUT"])


if __name__ == "__main__":
    main()
