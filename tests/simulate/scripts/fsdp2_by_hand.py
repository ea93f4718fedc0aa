"""FSDP2 with a mesh, clipping, and a full state dict on rank 0."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(mesh):
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


device_type = "cuda" if torch.cuda.is_available() else "cpu"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = build(mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
norms = []
for step in range(4):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(device_type)
    loss = nn.functional.cross_entropy(model(x), torch.full((4,), step % 3, device=device_type))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    norms.append(norm.full_tensor().item())
    optimizer.step()
    optimizer.zero_grad()
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
again = build(mesh)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(again, full, options=options)
x = torch.ones(2, 6, device=device_type)
difference = (again(x) - model(x)).abs().max().item()
if rank == 0:
    print("RESULT norms", *(f"{norm:.8f}" for norm in norms))
    print("RESULT full", len(full), f"{sum(value.abs().sum().item() for value in full.values()):.8f}")
    print("RESULT local", tuple(model[1].up.weight.to_local().shape), f"{difference:.8f}")
dist.destroy_process_group()
