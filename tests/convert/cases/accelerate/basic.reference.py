import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(32, 3)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=int(os.environ["BATCH"]))
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
torch.save(model.state_dict(), os.environ["OUT"])
