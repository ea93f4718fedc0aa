"""A first DDP script: globals, argparse, the backend by what is there."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()

use_cuda = torch.cuda.is_available()
dist.init_process_group(backend="nccl" if use_cuda else "gloo")
RANK = dist.get_rank()
WORLD_SIZE = dist.get_world_size()
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{LOCAL_RANK}" if use_cuda else "cpu")
if use_cuda:
    torch.cuda.set_device(device)
torch.set_default_dtype(torch.float64)
torch.manual_seed(1234)
history = []

x = torch.randn(48, 5)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
model = DDP(net, device_ids=[LOCAL_RANK] if use_cuda else None)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def train_one_epoch(epoch):
    sampler.set_epoch(epoch)
    total = torch.zeros(1, device=device)
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    history.append(total.item() / len(loader) / WORLD_SIZE)


for epoch in range(args.epochs):
    train_one_epoch(epoch)
if RANK == 0:
    print("RESULT losses", *(f"{value:.8f}" for value in history))
    print("RESULT weights", f"{sum(p.abs().sum().item() for p in net.parameters()):.8f}")
dist.destroy_process_group()
