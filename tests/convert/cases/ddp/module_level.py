import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

dist.init_process_group("gloo", init_method="env://")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 2))
sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
loader = DataLoader(data, sampler=sampler, batch_size=int(os.environ["BATCH"]), drop_last=True)
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=False)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save({"model": model.module.state_dict(), "ranks": torch.tensor(1)}, os.environ["OUT"])
dist.destroy_process_group()
