import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=g)
    centers = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, -1.0], [0.0, 0.0, 1.0, 0.0]])
    return TensorDataset(centers[labels] + 0.7 * torch.randn(n, 4, generator=g), labels)


def train_epoch(model, loader, optimizer, epoch):
    model.train()
    running, seen = 0.0, 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(targets)
        seen += len(targets)
    dw.print(f"epoch {epoch}: train loss {dw.mean(running / seen, seen):.4f}")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct, total = 0, 0
    for inputs, targets in loader:
        correct += (model(inputs).argmax(dim=1) == targets).sum().item()
        total += len(targets)
    correct, total = dw.reduce([correct, total], "sum")
    return correct / total


@dw.distributed()
def main(epochs=2):
    dw.seed_everything(1)
    train_loader = DataLoader(blobs(192, seed=0), batch_size=16, shuffle=True)
    train_loader = dw.shard_loader(train_loader, batch_size="global", order="stream")
    test_loader = dw.shard_loader(DataLoader(blobs(99, seed=1), batch_size=32))
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    model = dw.wrap_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        train_epoch(model, train_loader, optimizer, epoch)
        accuracy = evaluate(model, test_loader)
    return accuracy


if __name__ == "__main__":
    print(f"accuracy {main():.4f}")
