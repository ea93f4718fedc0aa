"""Megatron's division of an MLP by parallelize_module, with sequence parallelism, and DTensors by hand."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w2(torch.relu(self.w1(self.norm(x))))


world_size = int(os.environ["WORLD_SIZE"])
tp_mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
model = FeedForward(8, 16)
plan = {
    "norm": SequenceParallel(),
    "w1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "w2": RowwiseParallel(output_layouts=Replicate()),
}
model = parallelize_module(model, tp_mesh, plan)
model = parallelize_module(model, tp_mesh, {"w1": ColwiseParallel()})
inputs = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
model = parallelize_module(model, tp_mesh, inputs)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
losses = []
for step in range(4):
    torch.manual_seed(100 + step)  # the same on all ranks
    x, y = torch.randn(3, 8, 8), torch.randn(3, 8, 8)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
weight = model.w1.weight
assert isinstance(weight, DTensor)
table = distribute_tensor(torch.arange(32.0).reshape(8, 4), tp_mesh, [Shard(0)])
product = (table @ table.T).redistribute(placements=[Replicate()]).to_local()
moved = table.redistribute(placements=[Shard(1)])
total = table.sum().full_tensor().item()
full = weight.full_tensor()
if dist.get_rank() == 0:
    print("RESULT losses", *(f"{loss:.8f}" for loss in losses))
    print("RESULT weight", tuple(weight.to_local().shape), f"{full.abs().sum().item():.8f}")
    print("RESULT table", f"{product.trace().item():.1f} {total:.1f}", tuple(moved.to_local().shape))
dist.destroy_process_group()
