"""What is saved where strategies arrange the ranks of the whole run goes on under each other, bit by bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap import Strategy
from distwrap.options import Options
from distwrap.testing.nets import examples, small
from distwrap.testing.ranks import launch_ranks
from tests.checkpoint.test_between_strategies import FORMATS, differences, whole
from tests.plans import TP, TWO_BY_TWO

RUNS: dict[str, tuple[str | Strategy, int]] = {
    "single": ("single", 1),
    "fsdp": ("fsdp", 3),
    "tp": (TP, 2),
    "fsdp+tp": (TWO_BY_TWO, 4),
    "pipeline": ("pipeline", 2),
}


def made(seed: int) -> dict[str, Any]:
    """Return a model and its optimizer, with a state of its own."""
    model = dw.wrap_model(small(seed=seed))
    optimizer = dw.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(2):
        dw.backward(model.loss(*examples(8)))
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def save_both(folder: Path, name: str, seed: int) -> None:
    objects = made(seed)
    for io, suffix in FORMATS.items():
        dw.save(objects, folder / f"{name}{suffix}", io=io)
    truth = {key: whole(thing) for key, thing in objects.items()}
    if dw.rank() == 0:
        torch.save(truth, folder / f"{name}.truth")


def load_all(folder: Path) -> list[str]:
    """Load the checkpoints of all runs; return what was not the same."""
    objects, wrong = made(99), []
    for name in RUNS:
        truth = torch.load(folder / f"{name}.truth", weights_only=True)
        for suffix in FORMATS.values():
            dw.load(folder / f"{name}{suffix}", into=objects)
            wrong += [f"{name}{suffix}: {path}" for path in differences(objects, truth)]
    return wrong


@pytest.mark.nightly(row="products", why="test_between_strategies.py, and test_resumed_run.py")
@pytest.mark.timeout(400)  # a guard, of what takes half a minute
def test_each_runs_checkpoint_loads_in_each_other(tmp_path: Path) -> None:
    """A model of blocks and AdamW's state, in a file and in parts, on one to four ranks."""
    launches = {
        name: partial(launch_ranks, ranks, Options(timeout=60, returns="all", strategy=strategy), 110)
        for name, (strategy, ranks) in RUNS.items()
    }
    for seed, (name, launch) in enumerate(launches.items()):
        launch(save_both, tmp_path, name, seed)
    for name, launch in launches.items():
        for wrong in launch(load_all, tmp_path):
            assert wrong == [], name
