"""Mixup training; draws random numbers itself: numpy's beta for lambda, torch.randperm for the partners."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap import distributed, reduce, seed_everything, shard_loader, wrap_model


def mixup_data(x, y, alpha=1.0):
    """Return mixed inputs, pairs of targets, and lambda."""
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size(0)).to(x.device)
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def mixup_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


def train(epoch, net, trainloader, criterion, optimizer):
    net.train()
    train_loss, correct, total = 0.0, 0.0, 0
    for inputs, targets in trainloader:
        inputs, targets_a, targets_b, lam = mixup_data(inputs, targets)
        outputs = net(inputs)
        loss = mixup_criterion(criterion, outputs, targets_a, targets_b, lam)
        train_loss += loss.item() * len(inputs)
        predicted = outputs.argmax(1)
        total += len(inputs)
        correct += lam * (predicted == targets_a).sum().item() + (1 - lam) * (predicted == targets_b).sum().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    train_loss, correct, total = reduce([train_loss, float(correct), total], "sum")
    distwrap.print(f"epoch {epoch}: loss {train_loss / total:.3f} | acc {100 * correct / total:.2f}% of {total}")


@distributed()
def main():
    seed_everything(20)
    x = torch.randn(128, 3, 4, 4)
    y = x.mean((2, 3)).argmax(1)
    trainloader = shard_loader(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    net = wrap_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    for epoch in range(2):
        train(epoch, net, trainloader, nn.CrossEntropyLoss(), optimizer)
        scheduler.step()


if __name__ == "__main__":
    main()
