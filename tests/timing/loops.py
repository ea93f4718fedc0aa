"""Loops that are slow on purpose, each in one way; a sleep is longer than anything that busy cores add."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

STEPS, LONG = 12, 0.06


class Data(TensorDataset):
    """Samples that take a while on some ranks."""

    seconds = 0.0

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Net(nn.Module):
    """A net whose forward takes a while on some ranks, or with some batches."""

    def __init__(self, seconds: Callable[[int], float] = lambda step: 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.seconds, self.step = seconds, 0

    def forward(self, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            self.step += 1
            time.sleep(self.seconds(self.step))
        return self.net(x)


def train(
    seconds: Callable[[int], float] = lambda step: 0.0,
    of_data: float = 0.0,
    each: Callable[[int, nn.Module], object] = lambda step, model: None,
) -> nn.Module:
    data = Data(torch.randn(2 * 4 * STEPS, 8, generator=torch.Generator().manual_seed(0)))
    data.seconds = of_data / 4
    model = dw.wrap_model(Net(seconds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x,) in enumerate(dw.shard_loader(DataLoader(data, batch_size=4))):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        each(step, model)
    return model


def on(rank: int, seconds: float = LONG) -> float:
    return seconds if dw.rank() == rank else 0.0


def slow_loader() -> None:
    train(of_data=LONG)


def slow_loader_on_one() -> None:
    train(of_data=on(1))


def slow_forward_on_one() -> None:
    train(lambda step: on(0))


def slow_in_turns() -> None:
    train(lambda step: on(step % 2))


def uneven_batches() -> None:
    """Batches of which every other one is ten times as long."""
    model = dw.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        long = (step + dw.rank()) % 2
        model.seconds = lambda step, long=long: LONG * long
        model(torch.ones(4 + 36 * long, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation_on_one() -> None:
    def evaluate(step: int, model: nn.Module) -> None:
        if dw.is_rank_zero() and step % 3 == 2:
            with torch.no_grad():
                for _ in range(4):
                    model(torch.randn(4, 8))
                    time.sleep(LONG)

    train(each=evaluate)


def own_code_on_one() -> None:
    train(each=lambda step, model: time.sleep(on(1)))


def saving(folder: Path) -> None:
    def save(step: int, model: nn.Module) -> None:
        if step % 3 == 2:
            dw.save({"model": model, "more": torch.zeros(20_000_000)}, folder / "last.pt")

    train(each=save)


def neighbours_on_one() -> None:
    """Each rank has a CPU of its own, and rank 1 shares it with four programs that compute."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dw.rank()]})
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * dw.rank())]
    try:
        train(lambda step: compute())
    finally:
        for program in programs:
            program.kill()
            program.wait()


def compute(seconds: float = LONG) -> float:
    """Use a CPU for a while, by its own clock; return no more seconds to sleep."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return 0.0
