from __future__ import print_function

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from distwrap import distributed, rank_zero_only, save, shard_loader, wrap_model

print = rank_zero_only(print)


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print('Train Epoch: {} [{}/{}]\tLoss: {:.6f}'.format(
                epoch, batch_idx * len(data), len(train_loader.dataset), loss.item()))
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction='sum').item()  # sum up batch loss
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()

    test_loss /= len(test_loader.dataset)

    print('\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n'.format(
        test_loss, correct, len(test_loader.dataset),
        100. * correct / len(test_loader.dataset)))


@distributed
def main():
    parser = argparse.ArgumentParser(description='An example')
    parser.add_argument('--batch-size', type=int, default=int(os.environ['BATCH']))
    parser.add_argument('--lr', type=float, default=0.5)
    parser.add_argument('--dry-run', action='store_true', default=False)
    parser.add_argument('--log-interval', type=int, default=2)
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()

    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)

    if use_cuda:
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")

    train_kwargs = {'batch_size': args.batch_size}
    images, labels = torch.randn(48, 6), torch.arange(48) % 3
    train_loader = shard_loader(DataLoader(TensorDataset(images, labels), **train_kwargs))
    test_loader = DataLoader(TensorDataset(images[:9], labels[:9]), batch_size=4)

    model = Net().to(device)
    model = wrap_model(model)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)

    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    save(model.state_dict(), os.environ['OUT'])


if __name__ == '__main__':
    main()
