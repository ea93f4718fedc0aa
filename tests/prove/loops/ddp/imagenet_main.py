"""Train a classifier, with meters that print a line per epoch; the layout of everybody's main.py."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

parser = argparse.ArgumentParser(description="small classifier")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int, help="samples of one GPU")
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")


def main():
    torch.manual_seed(0)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.device = f"cuda:{args.rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 7)).to(args.device)
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    images = torch.randn(179, 3, 4, 4)
    dataset = TensorDataset(images, images.mean((2, 3)).argmax(1) + 3 * (images[:, 0, 0, 0] > 0))
    train_dataset, val_dataset = Subset(dataset, range(128)), Subset(dataset, range(128, 179))
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=DistributedSampler(train_dataset))
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    val_loader = DataLoader(val_dataset, batch_size=args.batch_size, shuffle=False, sampler=val_sampler)
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        validate(val_loader, model, args)
        scheduler.step()
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, args):
    losses = AverageMeter("Loss")
    model.train()
    for images, target in train_loader:
        output = model(images.to(args.device, non_blocking=True))
        loss = criterion(output, target.to(args.device, non_blocking=True))
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.all_reduce(args)
    if args.rank == 0:
        print(f"Epoch: [{epoch}]", losses)


def validate(val_loader, model, args):
    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                correct = model(images.to(args.device)).argmax(1) == target.to(args.device)
                top1.update(correct.float().mean().item() * 100.0, images.size(0))

    top1 = AverageMeter("Acc@1")
    model.eval()
    run_validate(val_loader)
    top1.all_reduce(args)
    seen = len(val_loader.sampler) * args.world_size
    if seen < len(val_loader.dataset):  # what does not divide evenly is looked at by everybody
        run_validate(DataLoader(Subset(val_loader.dataset, range(seen, len(val_loader.dataset))), args.batch_size))
    if args.rank == 0:
        print(" *", top1)


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, val, n=1):
        self.sum, self.count = self.sum + val * n, self.count + n

    def all_reduce(self, args):
        total = torch.tensor([self.sum, self.count], device=args.device)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.3f}"


if __name__ == "__main__":
    main()
