"""A run that was cut and goes on is, bit by bit, the run that was never cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distwrap as dw
from distwrap.group.world import current_world
from distwrap.precision import LossScaling
from tests.slow import slow

EPOCHS, SAMPLES = 3, 29


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with augmentation, drawn where they are fetched."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(4.0) * 0.1 + index / SAMPLES
        return x + 0.05 * torch.randn(4), x.sum().reshape(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(folder: Path, stop_after: int | None, precision: str, window: int) -> dict[str, Any] | None:
    """Train, saving after each step; ``stop_after`` steps leave as a job does whose time is up."""
    torch.manual_seed(100 + dw.rank())  # dropout of its own on each rank
    # DDP puts its buckets into another order after the first step, and the sum of three numbers depends on that.
    options = {"find_unused_parameters": True} if dw.world_size() > 2 else {}
    model = dw.wrap_model(Net(), **options)
    if precision == "fp16":
        current_world().part(LossScaling).scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    loader = dw.shard_loader(DataLoader(Noisy(), batch_size=3, shuffle=True), seed=7, mode="exact")
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "run": dw.run_state()}
    state = dw.resume_from(folder / "step-latest.pt", into=objects)
    steps = 0 if state is None else state["steps"]
    for _ in range(loader.state_dict()["epoch"], EPOCHS):
        for (x, y), micro in dw.accumulate(loader, window, model):
            dw.backward(dw.scale_loss(nn.functional.mse_loss(model(x), y, reduction="sum"), len(y)))
            if not micro.last:
                continue
            dw.optimizer_step(optimizer, max_norm=0.5, scheduler=scheduler)
            optimizer.zero_grad()
            steps += 1
            dw.save({**objects, "steps": steps}, folder / f"step-{steps}.pt", keep=2, background=True)
            if steps == stop_after:
                return None
    model.eval()
    dw.assert_in_sync(model)
    scaler = current_world().part(LossScaling).scaler
    return {
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
        "rate": scheduler.get_last_lr(),
        "moments": [value["exp_avg_sq"].tolist() for value in optimizer.state_dict()["state"].values()],
        "scale": None if scaler is None else scaler.get_scale(),
        "random": torch.rand(3).tolist(),
        "steps": steps,
    }


@pytest.mark.parametrize(
    ("nprocs", "precision", "window"),
    [
        (2, "fp16", 2),
        slow(2, "32", 1, why="one that is cut twice is in make test"),
        slow(1, "32", 2, why="one that is cut twice is in make test"),
        slow(3, "bf16", 2, why="one that is cut twice is in make test"),
    ],
)
def test_continued_is_uninterrupted(tmp_path: Path, nprocs: int, precision: str, window: int) -> None:
    """Weights, moments, statistics, learning rate, scale and random numbers, cut in the middle of epochs, twice."""
    run = dw.distributed(nprocs=nprocs, precision=precision, launcher="forkserver", timeout=60, returns="all", seed=3)(
        train
    )
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    expected = run(tmp_path / "whole", None, precision, window)
    for stop in (2, 5):
        assert run(tmp_path / "cut", stop, precision, window) == [None] * nprocs
    found = run(tmp_path / "cut", None, precision, window)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs
    assert expected[0] is not None
    if precision == "fp16":
        assert expected[0]["scale"] != 2.0**17  # some steps were skipped, and the scale has moved
