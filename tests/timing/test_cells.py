"""The report under strategies of every kind: who is slow, in what, and that nothing else changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distwrap as dw
from distwrap.group.world import current_world
from distwrap.options import Options
from distwrap.strategies.shards import local
from distwrap.testing import run_ranks
from distwrap.testing.ranks import launch_ranks
from tests.measuring import measured_again
from tests.plans import TP, TWO_BY_TWO
from tests.slow import nightly, slow

LONG, STEPS, WIDTH = 0.1, 4, 12
SAME = "the same wait as in other cells"
RUN = Options(timeout=60, returns="all")


class Feed(nn.Module):
    """Block that every strategy can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks between two layers; statistics are what rank 0 gives to all in each forward under DDP."""

    def __init__(self, statistics: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.Identity()
        self.blocks = nn.ModuleList(Feed() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


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


def train(style: str, place: str, net: nn.Module, seconds: float = LONG) -> list[bytes]:
    """Train with rank 1 slow in a place; return this rank's weights."""
    nap = seconds if dw.rank() == 1 else 0.0
    if place == "forward":
        for block in net.blocks:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda *_: time.sleep(nap / 2))
    model = dw.wrap_model(net)
    optimizer = dw.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    data = TensorDataset(torch.randn(8 * 4 * STEPS, 8, generator=torch.Generator().manual_seed(0)))
    batches: Any = dw.shard_loader(DataLoader(data, batch_size=4))
    if style == "windows":
        batches = dw.accumulate(dw.lockstep(batches), 2, model)
    else:
        batches = ((batch, None) for batch in batches)
    steps = 0
    for (x,), window in batches:
        out = model(x)
        if place == "backward":
            out = SleepBackward.apply(out, nap)
        dw.backward(out.square().mean())
        if window is None or window.last:
            dw.optimizer_step(optimizer)
            optimizer.zero_grad()
            steps += 1
        if steps == STEPS:
            break
    mine = [local(parameter.detach()) for parameter in model.parameters()]
    return [each.cpu().numpy().tobytes() for each in mine if type(each) is torch.Tensor]


def reported(style: str, place: str, statistics: bool) -> tuple[bool, int, dict[str, Any]]:
    """Train without a report, and with one."""
    found = []
    for reports in (False, True):
        dw.seed_everything(0)
        net = Net(statistics)
        if reports:
            with dw.report() as report:
                found.append(train(style, place, net))
        else:
            found.append(train(style, place, net, seconds=0.0))
    return found[0] == found[1], current_world().layout.size, report.figures


# Each kind of strategy with each place and each style, and each place with each style: where ranks wait for each other
# differs by these, in or after a backward, within a forward, or between steps.
CELLS = [
    ({"strategy": "ddp(broadcast_buffers=True)"}, "forward", "loader"),
    ({"strategy": "ddp(broadcast_buffers=True)"}, "backward", "windows"),
    ({"comm": "decentralized"}, "forward", "windows"),
    ({"comm": "decentralized"}, "backward", "loader"),
    ({"strategy": "fsdp"}, "forward", "windows"),
    ({"strategy": "fsdp"}, "backward", "loader"),
    ({"strategy": "pipeline"}, "forward", "loader"),
    ({"strategy": "pipeline"}, "backward", "windows"),
]


@pytest.mark.parametrize(
    ("options", "place", "style"),
    [
        CELLS[0],
        *(slow(*cell, why="measures loops of some seconds") for cell in CELLS[1:]),
        *(
            nightly(options, place, "loader", row="products", why=SAME)
            for options in ({"strategy": "zero1"}, {"strategy": TP}, {"comm": "powersgd"})
            for place in ("forward", "backward")
        ),
        nightly({"strategy": TWO_BY_TWO, "nprocs": 4}, "forward", "loader", row="products", why=SAME),
    ],
    ids=lambda value: (
        "".join(str(each).partition(",")[0] for each in value.values()) if isinstance(value, dict) else value
    ),
)
@measured_again
def test_a_slow_rank_under_strategies(options: dict[str, Any], place: str, style: str) -> None:
    """It is named, with what it does, also where the others wait for it within a forward or a backward."""
    options = dict(options)
    nprocs = options.pop("nprocs", 2)
    statistics = "ddp" in str(options)
    for is_same, shares, found in launch_ranks(nprocs, RUN.updated(options), 60, reported, style, place, statistics):
        assert is_same
        assert found["steps"] == STEPS - 1
        windows = 2 if style == "windows" else 1
        assert found["samples_per_second"] * found["step"] == pytest.approx(4 * shares * windows)
        lag = found["lags"][0]
        assert (lag["ranks"], lag["part"], lag["takes_turns"]) == ([1], place, False), found["ranks"]


class Stream(IterableDataset[torch.Tensor]):
    """Samples that take rank 0 a while, which reads them for all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(2 * 4 * STEPS):
            time.sleep(LONG / 8)
            yield torch.randn(8)


def dispatched() -> dict[str, Any]:
    model = dw.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dw.report() as report:
        for x in dw.shard_loader(DataLoader(Stream(), batch_size=4), split="dispatch"):
            model(x).square().mean().backward()
            optimizer.step()
    return report.figures


def joined() -> dict[str, Any]:
    model = dw.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dw.report() as report, Join([model]):  # type: ignore[list-item]
        for _ in range(STEPS - dw.rank()):
            time.sleep(LONG * dw.rank())
            model(torch.randn(4, 8, generator=dw.rank_generator(0))).square().mean().backward()
            optimizer.step()
    return report.figures


@pytest.mark.parametrize(("loop", "rank", "part"), [(dispatched, 0, "data"), (joined, 1, "own")])
@pytest.mark.slow("measures loops of some seconds")
@measured_again
def test_waits_of_other_kinds(loop: Any, rank: int, part: str) -> None:
    """For a rank that reads for all, and for one that takes fewer steps within torch's Join."""
    lag = run_ranks(loop, 2, timeout=60)[0]["lags"][0]
    assert (lag["ranks"], lag["part"], lag["takes_turns"]) == ([rank], part, False)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.slow("measures loops of some seconds")
@measured_again
def test_a_slow_rank_in_other_precisions(precision: str) -> None:
    options = RUN.updated({"precision": precision})
    for _, _, found in launch_ranks(2, options, 60, reported, "loader", "forward", False):
        assert (found["lags"][0]["ranks"], found["lags"][0]["part"]) == ([1], "forward")
