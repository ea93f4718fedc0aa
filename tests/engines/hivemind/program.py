"""A user's loop that trains with peers until so many global steps, and what it leaves on the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distwrap as dw
from distwrap.strategies.hivemind import HivemindStrategy, global_steps
from tests.engines.regression import ROWS, data, net

LIMIT = 150.0
STEP_SECONDS = 0.02  # of a local step, which takes no time of its own here


def strategy(nprocs: int, **options: Any) -> HivemindStrategy:
    """Return the strategy with the times of tests: each rank has its share of the rows."""
    given = {"matchmaking_seconds": 1.0, "averaging_seconds": 10.0, "batch_size": ROWS // nprocs, **options}
    return HivemindStrategy(**given)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a wrapped model, and its optimizer."""
    model = dw.wrap_model(net())
    return model, dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a local step by this rank's rows."""
    x, y = data()
    mine = slice(dw.rank(), None, dw.world_size())
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    optimizer.step()
    time.sleep(STEP_SECONDS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train until so many global steps."""
    deadline = time.monotonic() + LIMIT
    while global_steps(optimizer) < steps:
        step(model, optimizer)
        assert time.monotonic() < deadline, "no end"


def loss_of(model: nn.Module) -> float:
    """Return the loss over all rows."""
    x, y = data()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


def one_process(steps: int) -> float:
    """Return the loss after so many steps of one process over all rows, which are those of DDP."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return loss_of(model)


def left_behind(token: str) -> list[str]:
    """Return the processes with a folder in their environment, but for this one.

    torch's manager of shared memory ends by itself some seconds after the last process that used it.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if int(folder.name) != os.getpid() and token in (folder / "environ").read_text(errors="replace"):
                found.append(f"{folder.name} {command}")
        except OSError:
            continue
    return found
