import os
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from distwrap import (
    rank as distwrap_rank,
    save,
    setup_process_group,
    shard_loader,
    world_size as distwrap_world_size,
    wrap_model,
)

setup_process_group()
rank, world_size = distwrap_rank(), distwrap_world_size()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 2))
loader = shard_loader(DataLoader(data, batch_size=int(os.environ["BATCH"]), drop_last=True), mode="pad")
model = wrap_model(nn.Linear(2, 2), find_unused_parameters=False)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    loader.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
if distwrap_rank() == 0:
    save({"model": model.state_dict(), "ranks": torch.tensor(1)}, os.environ["OUT"], alone=True)
