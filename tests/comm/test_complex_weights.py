"""Complex weights beside real ones: DDP shows their gradients as pairs of real numbers, which nothing compresses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.testing import run_ranks


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(3).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs().pow(2).sum(-1) + self.bias.sum()


def _trained(comm: str | None) -> torch.Tensor:
    torch.manual_seed(0)
    model = dw.wrap_model(Spectrum(), comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5).double() * (1 + dw.rank())).mean().backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("comm", ["bf16", "bytegrad", "topk"])
def test_they_get_ddps_mean(comm: str) -> None:
    for found, expected in zip(run_ranks(_trained, 2, comm), run_ranks(_trained, 2, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
