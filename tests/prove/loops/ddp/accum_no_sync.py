"""Gradient accumulation by hand: all but the last micro-batch of a window under no_sync()."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 2
MAX_NORM = 0.1


def build_data(n: int = 192) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    features = torch.randn(n, 10, generator=g)
    answer = torch.tanh(features @ torch.randn(10, 2, generator=g)) + 0.1 * torch.randn(n, 2, generator=g)
    return TensorDataset(features, answer)


class Regressor(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(self.body(x))


def reduce_mean(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value / dist.get_world_size()


def main() -> None:
    use_cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    torch.manual_seed(42)
    model = DistributedDataParallel(Regressor().to(device), device_ids=[device] if use_cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    dataset = build_data()
    sampler = DistributedSampler(dataset, seed=17)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        window_loss, history = torch.zeros((), device=device), []
        for step, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            last_of_window = (step + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last_of_window else model.no_sync():
                loss = F.smooth_l1_loss(model(x), y) / ACCUMULATE
                loss.backward()
            window_loss += loss.detach()
            if last_of_window:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                history.append(reduce_mean(window_loss).item())
                window_loss.zero_()
        if rank == 0:
            print(f"epoch {epoch}: {len(history)} updates, loss {history[0]:.4f} -> {history[-1]:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
