"""A line says that the caller's model is as it was, where the ranks have trained copies of it and nothing goes home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw

LINE = "has trained copies of Net, and returned nothing: the caller's Net is as it was before."


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)


def train(net: nn.Module) -> nn.Module:
    model = dw.wrap_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in dw.shard_loader(DataLoader(TensorDataset(torch.arange(8.0).reshape(-1, 1)), batch_size=2)):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Trainer:
    def __init__(self) -> None:
        self.net: Any = Net()

    def fit(self) -> None:
        self.net = train(self.net)


def given(net: nn.Module) -> None:
    train(net)


def returns(net: nn.Module) -> float:
    return float(train(net).state_dict()["weight"])


def saves(net: nn.Module, path: Path) -> None:
    dw.save(train(net), path)


def makes(frozen: nn.Module) -> None:
    train(Net())
    dw.wrap_model(frozen)


def evaluates(net: nn.Module) -> None:
    with torch.no_grad():
        dw.wrap_model(net)(torch.ones(1, 1))


@pytest.mark.parametrize(
    ("function", "args", "options", "told"),
    [
        (Trainer().fit, (), {}, True),
        (given, (Net(),), {}, True),
        (given, (Net(),), {"launcher": "forkserver"}, True),
        (Trainer().fit, (), {"nprocs": 1}, False),
        (returns, (Net(),), {}, False),
        (saves, (Net(), Path("net.pt")), {}, False),
        (makes, (Net().requires_grad_(False),), {}, False),
        (evaluates, (Net(),), {}, False),
    ],
)
def test_a_line_says_so(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    told: bool,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes once, and not where the call runs here, returns or saves something, or has not trained the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    dw.distributed(**{"nprocs": 2, "seed": 0, "timeout": 60} | options)(function)(*args)
    assert capfd.readouterr().err.count(LINE) == told


def test_retrofit_brings_it_home(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With `retrofit=True`, as the line says, the caller's model is trained, and nothing is said."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    net = Net()
    before = net.weight.item()

    def fit(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(torch.full((1, 1), dw.rank() + step + 1.0)).mean().backward()
            optimizer.step()

    dw.distributed(nprocs=2, timeout=60, retrofit=True)(fit)(net)
    assert net.weight.item() != before
    assert "trained copies" not in capfd.readouterr().err
