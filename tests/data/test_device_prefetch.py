"""Batches on the rank's device, a step ahead where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distwrap import shard_loader, to_device
from distwrap.devices.kinds import SideStream
from tests.accelerator import accelerator
from tests.slow import nightly


def loader_of(**options: Any) -> DataLoader[Any]:
    rows = TensorDataset(torch.arange(64.0).reshape(32, 2), torch.arange(32))
    return DataLoader(rows, batch_size=4, **options)


def test_on_the_cpu_nothing_is_copied() -> None:
    """copy_ahead costs nothing where there is nothing to copy to: the loader is the one handed over."""
    loader = loader_of()
    assert shard_loader(loader, copy_ahead=True) is loader
    assert loader._sharding.copy_ahead is False  # type: ignore[attr-defined]


def test_the_position_is_the_loops_on_a_device_too() -> None:
    """What was copied to the device but not handed to the loop does not count."""
    loader: Any = shard_loader(loader_of(), device="meta", copy_ahead=True)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["consumed"] == 4
    assert [each.device.type for each in next(batches)] == ["meta"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, nightly(False, row="accelerator", why="pinned memory shows it")])
def test_copied_ahead_is_the_same(pinned: bool) -> None:
    """Batches that were copied on a stream of their own hold what the plain ones hold, also under a busy device."""
    plain = list(loader_of())
    loader: Any = shard_loader(loader_of(pin_memory=pinned), device=accelerator(), copy_ahead=True)
    busy = torch.randn(2000, 2000, device=accelerator())
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            busy = busy @ busy / busy.norm()
            assert loader.state_dict()["consumed"] == 4 * (number + 1)
            assert torch.equal(x.cpu(), plain[number][0])
            assert torch.equal(y.cpu(), plain[number][1])
            assert x.device.type == accelerator()


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the next batch runs beside the step: a step waits for no moment later than its own batch's copy."""
    waits: list[Any] = []
    moments: list[Any] = []
    wait, moment = SideStream.wait, SideStream.moment

    def noted(side: SideStream) -> Any:
        moments.append(moment(side))
        return moments[-1]

    monkeypatch.setattr(SideStream, "moment", noted)
    monkeypatch.setattr(SideStream, "wait", lambda side, until: (waits.append(until), wait(side, until)))
    assert len(list(shard_loader(loader_of(pin_memory=True), device=accelerator(), copy_ahead=True))) == 8
    steps, copies = [moments[number] for number in range(0, 16, 2)], [moments[number] for number in range(1, 16, 2)]
    order = [("copy", steps.index(each)) if each in steps else ("step", copies.index(each)) for each in waits]
    ahead = [each for number in range(7) for each in (("copy", number + 1), ("step", number))]
    assert order == [("copy", 0), *ahead, ("step", 7)]


def test_a_batch_of_ones_own_goes_to_the_device() -> None:
    """In any nesting, to the rank's device or the one that is named; on the CPU it is the batch itself."""
    batch = {"x": [torch.ones(2), torch.ones(1)], "name": "first"}
    assert to_device(batch) is batch
    moved = to_device(batch, "meta")
    assert [each.device.type for each in moved["x"]] == ["meta", "meta"]
    assert moved["name"] == "first"
    assert batch["x"][0].device.type == "cpu"  # type: ignore[union-attr]


@pytest.mark.gpu
def test_a_batch_of_ones_own_goes_to_the_accelerator() -> None:
    """The rank's device is the accelerator, where there is one."""
    assert to_device([torch.ones(2)])[0].device.type == accelerator()
