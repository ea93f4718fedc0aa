"""Kinds of devices: the CPU, CUDA, any that torch names, and those of other packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distwrap.devices.kinds import CPU, DeviceKind, device_kinds, kind_of, kind_that_prevents_fork, unused_devices
from distwrap.devices.selection import Devices, choose_backend, choose_nprocs, visible_devices
from distwrap.launch import fork_safety

PACKAGE = """
from distwrap.devices.kinds import DeviceKind

class Acme(DeviceKind):
    def __init__(self):
        super().__init__("xpu")

    def count(self):
        return 3

    def backend(self):
        return "acme_collectives"

    def unique_name(self, device):
        return f"ACME-{device.index}"

    def prevents_fork(self):
        return True

    def first_use(self):
        return "train.py:3"
"""


def torch_is_built_for(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Let torch name another accelerator than its own."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None if name is None else torch.device(name))


def test_another_packages_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package adds a kind of device by one class and one entry point, and everything asks that class."""
    (tmp_path / "acme_devices.py").write_text(PACKAGE)
    info = tmp_path / "acme_devices-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-devices\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[distwrap.device_kinds]\nxpu = acme_devices:Acme\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(device_kinds, "_installed", None)
    torch_is_built_for(monkeypatch, "xpu")
    device = torch.device("xpu", 1)
    assert visible_devices() == Devices("xpu", 3)
    assert choose_nprocs("auto", visible_devices()) == 3
    assert choose_backend("auto", device) == "acme_collectives"
    assert kind_of(device).unique_name(device) == "ACME-1"
    assert "train.py:3" in (fork_safety.refusal() or "")


def test_a_broken_kind_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose kind of device cannot be imported is named among the doctor's remarks, and breaks nothing."""
    monkeypatch.setattr(device_kinds, "_installed", None)
    monkeypatch.setattr("distwrap.entry_points.of_packages", lambda group: {"gone": ("nowhere:X",)})
    assert any("device kind 'gone' cannot be imported from nowhere:X" in remark for remark in unused_devices())


def test_an_accelerator_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any accelerator that torch names is counted, and gets the backend that torch names for it."""
    torch_is_built_for(monkeypatch, "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert visible_devices() == Devices("xpu", 4)
    assert type(kind_of("xpu")) is DeviceKind
    assert choose_backend("auto", torch.device("xpu")) == torch.distributed.Backend.default_device_backend_map["xpu"]


@pytest.mark.parametrize("name", ["mps", None])
def test_no_accelerator_with_a_process_group(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's MPS counts as none, since torch has no process group for it."""
    torch_is_built_for(monkeypatch, name)
    assert visible_devices() == Devices("cpu", 0)


def test_the_cpu_has_nothing_to_prepare() -> None:
    """The CPU is never counted, needs no waiting, has no state of its own and never prevents a fork."""
    cpu, device = kind_of("cpu"), torch.device("cpu")
    assert isinstance(cpu, CPU)
    cpu.use(device)
    cpu.finish(device)
    assert (cpu.count(), cpu.backend(), cpu.unique_name(device), cpu.random_state(device)) == (0, "gloo", None, None)
    assert cpu.processor(device).startswith("cpu ")
    assert not torch.cuda.is_initialized()
    assert kind_that_prevents_fork() is None
