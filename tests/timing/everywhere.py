"""Loop for every strategy, slow on purpose where it is told to be, which does not change what it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.strategies.shards import local

LONG, STEPS, WIDTH = 0.15, 6, 12


class Feed(nn.Module):
    """Block that every strategy can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Blocks between two layers, with statistics that rank 0 gives to all in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Feed() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class WithoutStatistics(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


class Attending(WithoutStatistics):
    """Blocks of sequences, between which others are divided."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unflatten(-1, (4, 2)).repeat(1, 1, 4))


class SleepBackward(torch.autograd.Function):
    """Sleep in a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


def train(
    make: Callable[[], nn.Module], slow_in: str = "", slow_rank: int = 0, seconds: float = LONG
) -> tuple[list[bytes], float]:
    """Train, and return this rank's weights, and the seconds from the end of the first step to that of the last."""
    dw.seed_everything(0)
    nap = seconds if dw.rank() == slow_rank else 0.0
    net = make()
    if slow_in == "forward":
        for block in net.blocks:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda *_: time.sleep(nap / 2))
    model = dw.wrap_model(net)
    optimizer = dw.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    data = TensorDataset(torch.randn(8 * 4 * STEPS, 8, generator=torch.Generator().manual_seed(0)))
    ends = []
    for step, (x,) in enumerate(dw.shard_loader(DataLoader(data, batch_size=4))):
        if step == STEPS:
            break
        if slow_in == "own":
            time.sleep(nap)
        out = model(x)
        if slow_in == "backward":
            out = SleepBackward.apply(out, nap)
        dw.backward(out.square().mean())
        dw.optimizer_step(optimizer)
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    mine = [local(parameter.detach()) for parameter in model.parameters()]
    return [each.cpu().numpy().tobytes() for each in mine if type(each) is torch.Tensor], ends[-1] - ends[0]
