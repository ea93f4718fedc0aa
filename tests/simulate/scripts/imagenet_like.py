"""A script in the manner of torch's ImageNet example, written for CUDA; PLAIN=1 is the CPU of the reference."""

import argparse
import os
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

PLAIN = os.environ.get("PLAIN") == "1"
parser = argparse.ArgumentParser(description="Training")
parser.add_argument("-b", "--batch-size", default=16, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--dist-backend", default="gloo" if PLAIN else "nccl")
parser.add_argument("-j", "--workers", default=0, type=int)
best_acc1 = 0


class AverageMeter:
    def __init__(self, name, device):
        self.name, self.device, self.sum, self.count = name, device, 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.6f}"


class ProgressMeter:
    def __init__(self, batches, meters, prefix):
        self.batches, self.meters, self.prefix = batches, meters, prefix

    def display(self, batch):
        print(f"{self.prefix} [{batch}/{self.batches}]", *map(str, self.meters))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def epoch_of(loader, model, criterion, optimizer, device, gpu, prefix):
    meters = [AverageMeter(name, device) for name in ("Loss", "Acc@1", "Acc@5")]
    progress = ProgressMeter(len(loader), meters, prefix)
    model.train(optimizer is not None)
    for i, (images, target) in enumerate(loader):
        if not PLAIN:
            images, target = images.cuda(gpu, non_blocking=True), target.cuda(gpu, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            output = model(images)
            loss = criterion(output, target)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        for meter, value in zip(meters, (loss, acc1, acc5), strict=False):
            meter.update(value.item(), images.size(0))
        if i % 2 == 0:
            progress.display(i + 1)
    for meter in meters:
        meter.all_reduce()
    if dist.get_rank() == 0:
        print("RESULT", prefix, *map(str, meters))
    return meters[1].sum / meters[1].count


def main_worker(gpu, args):
    global best_acc1
    if not PLAIN and not torch.cuda.is_available():
        warnings.warn("no GPU", stacklevel=2)
        raise SystemExit(1)
    dist.init_process_group(backend=args.dist_backend, init_method="env://")
    args.batch_size = max(1, args.batch_size // dist.get_world_size())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    device = torch.device("cpu") if PLAIN else torch.device(f"cuda:{gpu}")
    if not PLAIN:
        torch.cuda.set_device(gpu)
        model.cuda(gpu)
    model = nn.parallel.DistributedDataParallel(model, device_ids=None if PLAIN else [gpu])
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(10, (40,)))
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    pinned = {"pin_memory": not PLAIN, "num_workers": args.workers}
    train_loader = torch.utils.data.DataLoader(data, args.batch_size, sampler=sampler, **pinned)
    val_sampler = torch.utils.data.distributed.DistributedSampler(data, shuffle=False, drop_last=True)
    val_loader = torch.utils.data.DataLoader(data, args.batch_size, sampler=val_sampler, **pinned)
    file = os.path.join(tempfile.gettempdir(), f"imagenet-{os.getpid()}-{dist.get_rank()}.pt")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_of(train_loader, model, criterion, optimizer, device, gpu, f"train{epoch}")
        acc1 = epoch_of(val_loader, model, criterion, None, device, gpu, f"val{epoch}")
        scheduler.step()
        best_acc1 = max(acc1, best_acc1)
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "best": best_acc1}, file)
        checkpoint = torch.load(file, map_location="cpu" if PLAIN else f"cuda:{gpu}")
        model.load_state_dict(checkpoint["state_dict"])
    os.remove(file)
    if dist.get_rank() == 0:
        print(f"RESULT best {checkpoint['best']:.6f} {checkpoint['epoch']}")


if __name__ == "__main__":
    main_worker(int(os.environ["LOCAL_RANK"]), parser.parse_args())
    dist.destroy_process_group()
