"""FSDP2: each block is sharded over the mesh, then the root; clipped as any model."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.w2(F.gelu(self.w1(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim: int = 16, depth: int = 2, classes: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(dim, 4 * dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def global_mean(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (world_size,))

    torch.manual_seed(0)
    model = Stack().to(device_type)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(8)
    x = torch.randn(128, 16, generator=generator)
    dataset = TensorDataset(x, (x[:, :6] + x[:, 6:12]).argmax(1))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=5)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    for epoch in range(1):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            loss = F.cross_entropy(model(inputs.to(device_type)), labels.to(device_type))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            norm = norm.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            mean_loss = global_mean(loss)
            if rank == 0:
                print(f"step {step} loss {mean_loss:.4f} norm {norm.item():.4f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"{len(state)} tensors, sum of the head {state['head.weight'].sum().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
