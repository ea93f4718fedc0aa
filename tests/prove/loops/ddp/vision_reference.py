"""Classification reference: a logger of metrics that knows about processes, one function an epoch."""

import os
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def reduce_across_processes(val):
    t = torch.tensor(val, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


class MetricLogger:
    def __init__(self):
        self.totals, self.counts = defaultdict(float), defaultdict(int)

    def update(self, n, **values):
        for name, value in values.items():
            self.totals[name] += value.item() * n
            self.counts[name] += n

    def synchronize_between_processes(self):
        for name in self.totals:
            self.counts[name], self.totals[name] = reduce_across_processes([self.counts[name], self.totals[name]])

    def __str__(self):
        return "  ".join(f"{name}: {self.totals[name] / self.counts[name]:.4f}" for name in self.totals)


def init_distributed_mode(args):
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="nccl", world_size=args.world_size, rank=args.rank)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def train_one_epoch(model, criterion, optimizer, data_loader, epoch, args):
    model.train()
    metric_logger = MetricLogger()
    for image, target in data_loader:
        loss = criterion(model(image.cuda()), target.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric_logger.update(len(image), loss=loss)
    metric_logger.synchronize_between_processes()
    if args.rank == 0:
        print(f"Epoch: [{epoch}] lr: {optimizer.param_groups[0]['lr']:.5f}  {metric_logger}")


@torch.inference_mode()
def evaluate(model, criterion, data_loader, args):
    model.eval()
    metric_logger = MetricLogger()
    for image, target in data_loader:
        output, target = model(image.cuda()), target.cuda()
        metric_logger.update(
            len(image), loss=criterion(output, target), acc1=(output.argmax(1) == target).float().mean()
        )
    metric_logger.synchronize_between_processes()
    if args.rank == 0:
        print(f"Test: {metric_logger} of {metric_logger.counts['acc1']:.0f}")


def main(args):
    init_distributed_mode(args)
    torch.manual_seed(11)
    x = torch.randn(192, 12)
    y = (x @ torch.randn(12, 5)).argmax(1)
    dataset, dataset_test = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
    data_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=DistributedSampler(dataset))
    test_sampler = DistributedSampler(dataset_test, shuffle=False)
    data_loader_test = DataLoader(dataset_test, batch_size=args.batch_size, sampler=test_sampler)
    lr = args.lr * data_loader.batch_size * args.world_size / 32  # it is given for 32 samples a step
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 5)).cuda()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    model = nn.parallel.DistributedDataParallel(model)
    for epoch in range(args.epochs):
        data_loader.sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, epoch, args)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, args)


if __name__ == "__main__":
    main(SimpleNamespace(batch_size=8, epochs=2, lr=0.2))
