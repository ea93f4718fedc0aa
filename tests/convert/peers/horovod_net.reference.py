"""The training of horovod_net.py in plain torch, in one process."""

import sys
import types
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

# What the program defines, without the package that it needs to train.
text = Path(__file__).with_name("horovod_net.py").read_text().partition("def train")[0]
program = types.ModuleType("program")
exec("\n".join(line for line in text.splitlines() if "hvd" not in line), program.__dict__)

torch.manual_seed(42)
torch.set_default_dtype(torch.float64)
data = program.Digits(96, 0)
sampler = DistributedSampler(data, num_replicas=1, rank=0)
loader = DataLoader(data, int(sys.argv[1]), sampler=sampler)
model = program.Net()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]), momentum=0.5)
for epoch in range(1, 4):
    sampler.set_epoch(epoch)
    for inputs, target in loader:
        optimizer.zero_grad()
        functional.nll_loss(model(inputs), target).backward()
        optimizer.step()
torch.save({"model": model.state_dict()}, "checkpoint-4.pth.tar")
