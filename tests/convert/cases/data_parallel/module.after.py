import os

import torch
from torch.utils.data import DataLoader, TensorDataset
from distwrap import save, setup_process_group, shard_loader, unwrap_model, wrap_model

setup_process_group()

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 3))
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
model = wrap_model(model)
optimizer = torch.optim.Adam([{"params": unwrap_model(model)[0].parameters()}, {"params": unwrap_model(model)[1].parameters()}])
for epoch in range(2):
    for (x,) in shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"])), batch_size="global"):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
save(model.state_dict(), os.environ["OUT"])
