"""The training of fabric_net.py in plain torch, in one process."""

import sys
import types
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

# What the program defines, without the package that it needs to train.
text = Path(__file__).with_name("fabric_net.py").read_text().partition("def train")[0]
program = types.ModuleType("program")
exec("\n".join(line for line in text.splitlines() if "lightning" not in line), program.__dict__)

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
loader = DataLoader(program.pictures(96, 0), int(sys.argv[1]))
model = program.Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(3):
    for data, target in loader:
        optimizer.zero_grad()
        functional.nll_loss(model(data), target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    schedule.step()
torch.save({"model": model.state_dict()}, "digits.pt")
