import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank_zero_only, reduce, save, shard_loader, wrap_model

print = rank_zero_only(print)

BATCH_SIZE = int(os.environ["BATCH"])


def train_one_epoch(model, loader, optimizer):
    running = 0.0
    correct = 0
    for x, y in loader:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        correct += (out.argmax(1) == y).sum().item()
    running, correct = reduce((running, correct), op="sum")
    acc = 100.0 * correct / (reduce(len(loader), op="sum") * BATCH_SIZE)
    return running, acc


def evaluate(model, loader):
    total, batches = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.cross_entropy(model(x), y).item()
            batches += 1
        total, batches = reduce((total, batches), op="sum")
    return total, batches


@distributed
def main():
    torch.manual_seed(0)
    x, y = torch.randn(32, 10, dtype=torch.float64), torch.randint(0, 3, (32,))
    train_loader = shard_loader(DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE))
    val_loader = shard_loader(DataLoader(TensorDataset(x[:16], y[:16]), batch_size=BATCH_SIZE))
    model = wrap_model(nn.Linear(10, 3).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loss, acc = train_one_epoch(model, train_loader, optimizer)
        total, batches = evaluate(model, val_loader)
        val_loss = total / batches
        print(f"epoch {epoch} loss {loss / reduce(len(train_loader), op='sum'):.4f} acc {acc:.1f} val {val_loss:.4f}")
    numbers = {"loss": torch.tensor(loss / reduce(len(train_loader), op="sum")), "acc": torch.tensor(acc), "val": torch.tensor(val_loss)}
    save({"model": model.state_dict(), "numbers": numbers}, os.environ["OUT"])


if __name__ == "__main__":
    main()
