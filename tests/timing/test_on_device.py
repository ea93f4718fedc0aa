"""The report and the trace where models train on an accelerator, whose own events tell the time of its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.group.world import current_world
from distwrap.stopwatch import DeviceClock
from distwrap.timing.recorder import Measuring
from tests.accelerator import accelerator
from tests.timing import loops, test_cells

pytestmark = pytest.mark.gpu


def waits() -> int:
    """Train, and return how often the processor has waited for all that the device was given."""
    module, counted = torch.get_device_module(dw.device()), []
    plain = module.synchronize
    module.synchronize = lambda *args: counted.append(plain(*args))
    try:
        loops.train()
    finally:
        module.synchronize = plain
    return len(counted)


def reported() -> tuple[dict[str, Any], bool]:
    usual = waits()
    with dw.report() as found:
        measuring = current_world().part(Measuring)
        by_events = isinstance(measuring.begin().stopwatch._clock, DeviceClock)
        measuring.end()
        assert waits() == usual
    return found.figures, by_events


@pytest.mark.gpu(1, 2)
def test_parts_by_the_devices_events(devices: int) -> None:
    """They add up to the step, on the device's clock, and nothing waits for the device before the end."""
    found, by_events = dw.distributed(nprocs=devices)(reported)()
    assert by_events
    assert found["steps"] == loops.STEPS * 2 // devices - 1
    for rank in found["ranks"]:
        assert rank["device"].startswith(accelerator())
        assert all(seconds >= 0 for seconds in rank["parts"].values())
        assert sum(rank["parts"].values()) == pytest.approx(found["step"], rel=0.5)


def slow_backward() -> dict[str, Any]:
    with dw.report() as found:
        test_cells.train("loader", "backward", test_cells.Net(), seconds=0.5)  # more than what busy cores take
    return found.figures


@pytest.mark.gpu(2)
def test_waits_in_a_thread_of_the_devices(devices: int) -> None:
    """There a backward runs, and FSDP waits in it for the weights of ranks that are behind."""
    (lag, *_) = dw.distributed(nprocs=devices, strategy="fsdp")(slow_backward)()["lags"]
    assert (lag["ranks"], lag["part"]) == ([1], "backward")


def traced(path: str) -> None:
    with dw.trace(steps=range(2, 3), path=path):
        loops.train()


def test_a_trace_on_the_device(tmp_path: Path) -> None:
    dw.distributed(nprocs=1)(traced)(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    assert any(event["name"] == "distwrap: backward" for event in events)
