"""What is saved under one strategy goes on under each other, bit by bit: on four ranks, then on three, then in one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy, Strategy
from distwrap.model.wrapped_models import bound_strategy
from distwrap.testing import run_ranks


@dataclass(frozen=True)
class Row:
    """A strategy on four ranks, and on three."""

    name: str
    on_four: str | Strategy
    on_three: str | Strategy


ROWS = [
    Row("ddp", "ddp", "ddp"),
    Row("zero1", "zero1", "zero1"),
    Row("fsdp", "fsdp", "fsdp"),
    Row("hsdp", FSDPStrategy(shard=2), FSDPStrategy(shard=1)),
]
FORMATS = {"file": ".pt", "sharded": ""}


class Net(nn.Module):
    """Blocks whose rows no number of ranks divides, a tied and a frozen weight, running statistics, a number."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.again = nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.again(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale + self.frozen  # type: ignore[no-any-return]


def made(strategy: str | Strategy, seed: int) -> dict[str, Any]:
    """Return a model and its optimizer, with a state of its own."""
    model = dw.wrap_model(Net(seed=seed), strategy=strategy, same_inputs=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = dw.wrap_optimizer(torch.optim.AdamW(trained, lr=0.01))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        dw.backward(model(torch.randn(4, 5, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def whole(thing: Any) -> dict[str, Any]:
    """Return the state of a model or optimizer as one process has it."""
    strategy = bound_strategy(thing)
    return copy.deepcopy(thing.state_dict() if strategy is None else strategy.state(thing, everywhere=True))


def save_each(folder: Path) -> None:
    for seed, row in enumerate(ROWS):
        objects = made(row.on_four, seed)
        for io, suffix in FORMATS.items():
            dw.save(objects, folder / f"{row.name}{suffix}", io=io)
        truth = {name: whole(thing) for name, thing in objects.items()}
        if dw.rank() == 0:
            torch.save(truth, folder / f"{row.name}.truth")


def load_each_and_save_again(folder: Path) -> list[str]:
    """Load each checkpoint under each strategy; return what was not the same. Save each once more."""
    wrong = []
    objects = {row.name: made(row.on_three, 99) for row in ROWS}
    pairs = [pair for pair in product(["single", *objects], objects) if pair[0] != pair[1]]
    ways = [list(FORMATS.items())[number % 2] for number, _ in enumerate(pairs)]  # half of them in a file
    again = [((row.name, row.name), way) for row in ROWS for way in FORMATS.items()]
    for (source, target), (io, suffix) in [*zip(pairs, ways, strict=True), *again]:
        other = objects[target]
        loaded = dw.load(folder / f"{source}{suffix}", into=other)
        if is_in_pieces(loaded["optimizer"]["state"]) != (target != "ddp"):
            wrong.append(f"{source}{suffix} to {target}: not read in pieces")
        truth = torch.load(folder / f"{source}.truth", weights_only=True)
        wrong += [f"{source}{suffix} to {target}: {path}" for path in differences(other, truth)]
        if source == target:
            dw.save(other, folder / f"{target}-again{suffix}", io=io)
    return wrong


def is_in_pieces(state: dict[Any, dict[str, Any]]) -> bool:
    """Return whether a rank has read less than all of an optimizer's state."""
    values = [value for entry in state.values() for value in entry.values()]
    return any(value is None or type(value).__name__ == "DTensor" for value in values)


def differences(objects: dict[str, Any], truth: dict[str, Any]) -> Iterator[str]:
    for name, thing in objects.items():
        yield from unlike(whole(thing), truth[name], name)


def unlike(found: Any, expected: Any, path: str) -> Iterator[str]:
    if isinstance(expected, dict):
        if list(found) != list(expected):
            yield f"{path}: {list(found)}"
        for key in found.keys() & expected.keys():
            yield from unlike(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from unlike(one, other, f"{path}.{index}")
    elif isinstance(expected, torch.Tensor):
        if type(found) is not torch.Tensor or found.dtype != expected.dtype or not torch.equal(found, expected):
            yield f"{path}: {found}"
    elif found != expected:
        yield f"{path}: {found}"


@pytest.mark.slow("saves under five strategies, and loads under each other")
def test_each_strategys_checkpoint_loads_in_each_other(tmp_path: Path) -> None:
    """A model with tied and frozen weights and AdamW's state, in a file and in parts."""
    run_ranks(save_each, 4, tmp_path, timeout=120)
    alone = made("single", 50)
    for io, suffix in FORMATS.items():
        dw.save(alone, tmp_path / f"single{suffix}", io=io)
    torch.save({name: whole(thing) for name, thing in alone.items()}, tmp_path / "single.truth")
    for wrong in run_ranks(load_each_and_save_again, 3, tmp_path, timeout=120):
        assert wrong == []
    for row, suffix in product(ROWS, FORMATS.values()):
        dw.load(tmp_path / f"{row.name}-again{suffix}", into=(objects := made("single", 51)))
        truth = torch.load(tmp_path / f"{row.name}.truth", weights_only=True)
        assert list(differences(objects, truth)) == [], row.name + suffix
