"""A script with setup_process_group, lockstep over uneven data, and accumulate."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw


def batches_of(rank):
    x = torch.randn(5 + 3 * rank, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=2)


dw.setup_process_group()
torch.manual_seed(1)
model = dw.wrap_model(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
steps, seen = 0, 0
for _epoch in range(2):
    loader = dw.lockstep(batches_of(dw.rank()), uneven="empty")
    for (x, y), window in dw.accumulate(loader, 2, model):
        loss = nn.functional.mse_loss(model(x), y, reduction="sum") / window.size
        loss.backward()
        if window.last:
            optimizer.step()
            optimizer.zero_grad()
        steps, seen = steps + 1, seen + len(x)
dw.barrier()
total = dw.reduce(torch.tensor([float(seen)], dtype=torch.float64))
weights = sum(p.detach().abs().sum().item() for p in model.parameters())
if dw.rank() == 0:
    print(f"RESULT steps {steps} seen {total.item():.0f}")
    print(f"RESULT weights {weights:.8f}")
dw.teardown_process_group()
