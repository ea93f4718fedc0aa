"""Devices without float64, as those of some makers are: nothing of ours needs it there, and sums are as exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.devices.kinds import widest
from distwrap.errors import DriftError
from distwrap.group.collectives import total
from distwrap.testing import run_ranks
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly
from tests.accelerator.test_equality import STEPS, assert_near, data, hidden, net
from tests.comm.test_with_ddp import GRADIENT, WEIGHT
from tests.conformance.base import check
from tests.conformance.behaviours import ALL
from tests.conformance.cells import AGAIN, CELLS
from tests.slow import slow

pytestmark = pytest.mark.gpu(2)

TINY = 2.0**-40  # which float32 loses beside 1


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    if accelerator() != "pretend":
        pytest.skip("of pretended devices, which can be told to have no float64")
    monkeypatch.setenv("PRETEND_WITHOUT_FLOAT64", "1")


def _exchanged() -> dict[str, Any]:
    device, rank = dw.device(), dw.rank()
    if device.type != "cpu":
        assert widest(device) == torch.float32
        with pytest.raises(TypeError, match="no float64"):
            torch.ones(1, dtype=torch.float64, device=device)
    exact = torch.tensor([1.0, rank + TINY, -3.0], dtype=torch.float64)
    found: dict[str, Any] = {
        "number": dw.reduce(1.0 + rank * TINY, "sum"),
        "mean": dw.mean(1.0 + rank * TINY, count=rank + 1),
        "total": total(1.0 + rank * TINY),
        "gathered": dw.gather(exact),
        "broadcast": dw.broadcast(exact, src=1),
        "complex": dw.reduce(exact * (1 + 2j), "sum"),
        **{op: dw.reduce(exact, op) for op in ("sum", "mean", "min", "max")},
    }
    for name, tensor in {
        "large": torch.tensor([2**60, rank]), "bytes": torch.tensor([200, 7 + rank], dtype=torch.uint8),
    }.items():  # fmt: skip
        here = tensor.to(device)
        found |= {f"{name} {op}": dw.reduce(here, op) for op in ("sum", "mean", "max")}
        found[f"{name} by weight"] = dw.mean(here, count=rank + 1)
        assert found[f"{name} by weight"].device == found[f"{name} mean"].device == device
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def test_exchange_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and tensors in float64 lose nothing on the way; a mean of whole numbers on a device is a float32."""
    found = run_ranks(_exchanged, 2, timeout=100)
    hidden(monkeypatch)
    for mine, theirs in zip(found, run_ranks(_exchanged, 2, timeout=100), strict=True):
        assert mine["number"] == 2 + TINY
        for name, value in theirs.items():
            is_narrow = " mean" in name or "weight" in name
            assert mine[name] == (pytest.approx(value, rel=1e-6) if is_narrow else value), name


def _apart(changed: bool) -> str:
    model = nn.Linear(3, 2).to(dw.device())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5 + (changed and dw.rank() == 1))
    try:
        dw.assert_in_sync(model)
    except DriftError as error:
        return str(error)
    return ""


@in_nightly
def test_what_differs_is_told() -> None:
    """`assert_in_sync` tells tensors apart, with the sums of their numbers."""
    assert run_ranks(_apart, 2, False, timeout=100) == ["", ""]
    for words in run_ranks(_apart, 2, True, timeout=100):
        assert "'weight' is the first that differs: rank 0 one whose absolute values sum to 3 and rank 1 " in words
        assert words.endswith("sum to 9.")


def _trained_by(comms: list[str | None]) -> dict[str | None, list[list[float]]]:
    return {comm: _trained(comm) for comm in comms}


def _trained(comm: str | None) -> list[list[float]]:
    model = dw.wrap_model(net().float(), comm=comm)
    make = torch.optim.Adam if "qadam" in str(comm) else torch.optim.SGD
    optimizer = dw.wrap_optimizer(make(model.parameters(), lr=0.05), model)
    for step in range(STEPS):
        x, y = (part.float().to(dw.device()) for part in data(step, dw.rank()))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    dw.consolidate(model)
    dw.assert_in_sync(model)
    return [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


@in_nightly
def test_ways_of_exchange_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each algorithm computes what it computes on the CPU, but for roundings, which move a code of 8 bits by one."""
    comms = [None, *(each for each in (*GRADIENT, *WEIGHT) if "async" not in each)]
    found = run_ranks(_trained_by, 2, comms, timeout=100)
    hidden(monkeypatch)
    for mine, theirs in zip(found, run_ranks(_trained_by, 2, comms, timeout=100), strict=True):
        for comm in comms:
            assert_near(mine[comm], theirs[comm], 1e-3 if "8" in str(comm) or "qadam" in str(comm) else 1e-5)


@in_nightly
@pytest.mark.parametrize(
    "strategy", ["ddp", *(slow(each, why="some thirty behaviours") for each in ("zero1", "fsdp", "pipeline"))]
)
def test_the_suite(strategy: str) -> None:
    """All that a loop does passes, in float32; of strategies that divide it is asked what depends on how they do."""
    (cell,) = (each for each in CELLS if each.name == strategy)
    asked = set(ALL if strategy == "ddp" else AGAIN) - {"float64", *cell.lacks}
    passed = check(cell.strategy, 2, asked, cell.refuses, torch.float32)
    assert len(passed) > (70 if strategy == "ddp" else 25)
