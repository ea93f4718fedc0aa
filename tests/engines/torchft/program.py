"""A training in which ranks die at given places, and which writes down what each of them does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distwrap as dw

SAMPLES, BATCH, EPOCHS = 96, 4, 3


class Numbered(Dataset[Any]):
    """Samples that know their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = self.x @ torch.randn(6, 2, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


class Killer:
    """Kills of ranks, each at its place, and each once.

    Args:
        folder: in which they are noted.
        kills: of the rank that the launcher numbers so, at an epoch, a step of that epoch, and a place in the step.
    """

    def __init__(self, folder: Path, kills: list[tuple[int, int, int, str]], how: int = signal.SIGKILL) -> None:
        self.folder, self.kills, self.how = folder, kills, how
        self.number = dw.rank()

    def at(self, epoch: int, step: int, where: str) -> None:
        """Die here, if somebody is to."""
        if (self.number, epoch, step, where) in self.kills:
            mark = self.folder / f"killed-{self.number}-{epoch}-{step}-{where}"
            if not mark.exists():
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), self.how)
                time.sleep(60)


def train(
    folder: Path,
    kills: list[tuple[int, int, int, str]],
    *,
    number_of: dict[int, int] | None = None,
    workers: int = 0,
    scheduled: bool = True,
    pause: float = 0.0,
    how: int = signal.SIGKILL,
) -> dict[str, Any]:
    """Train, and return the weights, the loss over all samples, and the learning rate."""
    torch.manual_seed(11)
    killer = Killer(folder, kills, how)
    killer.number = first_number(folder)
    data = Numbered()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = dw.wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) if scheduled else None
    loader = dw.shard_loader(DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers))
    evaluation = dw.shard_loader(DataLoader(data, batch_size=BATCH))
    killer.at(-1, 0, "setup")
    means = []
    with open(folder / f"steps-{killer.number}-{os.getpid()}", "w", buffering=1) as steps:
        for epoch in dw.resumable(range(EPOCHS)):
            for step, (numbers, x, y) in enumerate(loader):
                killer.at(epoch, step, "forward")
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                killer.at(epoch, step, "averaged")
                before = model[0].weight.detach().clone()
                optimizer.step()
                taken = not torch.equal(before, model[0].weight)
                line = {"epoch": epoch, "numbers": numbers.tolist(), "taken": taken, "time": time.time()}
                steps.write(json.dumps({**line, "weights": digest(model)}) + "\n")
                killer.at(epoch, step, "stepped")
                time.sleep(pause)
            if scheduler is not None:
                scheduler.step()
            killer.at(epoch, 0, "between")
            means.append(mean_loss(model, evaluation, killer, epoch))
    assert dw.gather(torch.tensor([1])).numel() == dw.world_size()
    return {
        "weights": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "loss": nn.functional.mse_loss(model(data.x), data.y).item(),
        "means": means,
        "lr": optimizer.param_groups[0]["lr"],
        "rank": dw.rank(),
    }


def first_number(folder: Path) -> int:
    """Return the number that the launcher has given this rank, which keeps it when it comes back."""
    from distwrap.group.world import current_world

    members = current_world().members
    return dw.rank() if members is None else members.number  # type: ignore[attr-defined]


@torch.no_grad()
def mean_loss(model: nn.Module, loader: DataLoader[Any], killer: Killer, epoch: int) -> float:
    """Return the mean over all samples, of which each rank takes its share."""
    total, count = 0.0, 0
    for step, (_, x, y) in enumerate(loader):
        killer.at(epoch, step, "evaluation")
        total += nn.functional.mse_loss(model(x), y).item() * len(x)
        count += len(x)
    killer.at(epoch, 0, "evaluated")
    return float(dw.mean(total / count, count))


def digest(model: nn.Module) -> float:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().sum().item()


def steps_of(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of a rank and one of its steps, for all steps of all ranks."""
    for path in sorted(folder.glob("steps-*")):
        for line in path.read_text().splitlines():
            yield int(path.name.split("-")[1]), json.loads(line)
