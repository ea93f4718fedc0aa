"""A hand-written loop, distributed; imported by tests and run as a script under launchers that start scripts.

The same samples in the same global batches whatever the number of ranks, so its weights must be those of one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distwrap as dw

SAMPLES, GLOBAL_BATCH, EPOCHS = 96, 24, 3
Weights = dict[str, dict[str, torch.Tensor]]


def data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = (x**2).sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), y.to(dtype))


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def fit(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def train() -> Weights:
    """Train in float64 and float32, shuffled; return both models' weights."""
    weights: Weights = {}
    for dtype in (torch.float64, torch.float32):
        model = dw.wrap_model(network(dtype))
        loader = dw.shard_loader(
            DataLoader(data(dtype), batch_size=GLOBAL_BATCH, shuffle=True), batch_size="global", seed=11
        )
        fit(model, loader)
        weights[str(dtype)] = {name: value.clone() for name, value in model.state_dict().items()}
    return weights


def reference() -> Weights:
    """The same in plain torch and one process."""
    weights: Weights = {}
    for dtype in (torch.float64, torch.float32):
        model, dataset = network(dtype), data(dtype)
        sampler: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=11)
        loader = DataLoader(dataset, batch_size=GLOBAL_BATCH, sampler=sampler)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in loader:
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights[str(dtype)] = dict(model.state_dict())
    return weights


def assert_equal_to_reference(weights: Weights, expected: Weights) -> None:
    for dtype, tolerance in (("torch.float64", 1e-9), ("torch.float32", 1e-5)):
        for name, value in expected[dtype].items():
            torch.testing.assert_close(weights[dtype][name], value, rtol=0, atol=tolerance)


@dw.distributed(nprocs=2)
def main() -> Weights:
    return train()


if __name__ == "__main__":
    result = main()
    if dw.is_rank_zero():
        torch.save(result, Path(sys.argv[1]))
