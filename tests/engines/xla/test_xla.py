"""torch_xla's own package: on its CPU it has one device, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import OptionError, WorkerError

pytest.importorskip("torch_xla")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")


def trained(device: torch.device) -> list[list[float]]:
    torch.manual_seed(5)
    model: Any = dw.wrap_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        x = torch.linspace(-1, 1, 32).reshape(8, 4) * (1 + step)
        loss = model(x).square().mean()
        dw.backward(loss)
        dw.optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    assert {parameter.device for parameter in model.parameters()} == {device}
    return [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


def on_rank() -> tuple[str, int, list[list[float]]]:
    return str(dw.device()), dw.world_size(), trained(dw.device())


@pytest.mark.parametrize("strategy", ["xla", "tpu_spawn"])
def test_it_trains_on_torch_xlas_device(strategy: str) -> None:
    """The weights are those of the CPU."""
    device, size, weights = dw.distributed(strategy=strategy, timeout=100)(on_rank)()
    assert (device, size) == ("xla:0", 1)
    for mine, theirs in zip(weights, trained(torch.device("cpu")), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_a_report_says_what_torch_tells(capfd: pytest.CaptureFixture[str]) -> None:
    """Of these devices torch tells no memory, and the rest is there."""
    dw.distributed(strategy="xla", report=True, timeout=100)(on_rank)()
    assert "xla:0" in capfd.readouterr().err


def _failing() -> None:
    raise KeyError("of the rank")


def test_a_failure_comes_home() -> None:
    """An exception in a rank is the caller's, in its own type."""
    with pytest.raises(KeyError, match="of the rank"):
        dw.distributed(strategy="xla")(_failing)()


def _dying() -> None:
    import os

    os._exit(3)


def test_a_rank_that_dies_is_an_error() -> None:
    """torch_xla's error says that a process is gone."""
    with pytest.raises((WorkerError, dw.errors.LaunchError), match=r"torch_xla|ended"):
        dw.distributed(strategy="xla")(_dying)()


def test_how_many_is_torch_xlas_to_say() -> None:
    """``nprocs`` cannot choose, and the launcher is its own."""
    with pytest.raises(OptionError, match="TPU_VISIBLE_CHIPS"):
        dw.distributed(strategy="xla", nprocs=2)(on_rank)()
    with pytest.raises(OptionError, match="launcher='xla'"):
        dw.distributed(strategy="xla", launcher="spawn")(on_rank)()
