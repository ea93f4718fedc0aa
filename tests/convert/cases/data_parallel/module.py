import os

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 3))
model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)), device_ids=None)
optimizer = torch.optim.Adam([{"params": model.module[0].parameters()}, {"params": model.module[1].parameters()}])
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=int(os.environ["BATCH"])):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
torch.save(model.module.state_dict(), os.environ["OUT"])
