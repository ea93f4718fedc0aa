"""What DeepSpeed can do on some machines only: NVMe, for which any folder of this one stands in, and float16."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError, OptionError, PrecisionError
from distwrap.strategies.deepspeed import DeepSpeedStrategy, gathered_weights
from tests.engines.deepspeed.test_deepspeed import assert_close, launch

WIDTH = 1024  # so that a rank's share of a weight is large enough to leave the memory: a megabyte
GUARDED = pytest.mark.timeout(900)  # of what takes half a minute, and the first time minutes of a compiler
CANNOT_BE_BUILT = 3
BUILD = f"""
from deepspeed.ops.op_builder import AsyncIOBuilder
if not AsyncIOBuilder().is_compatible():
    raise SystemExit({CANNOT_BE_BUILT})
AsyncIOBuilder().load()  # minutes of a compiler, once
"""


def net() -> nn.Module:
    """Make the net whose weights are a seed's."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train by this rank's rows of one batch."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    mine = slice(dw.rank(), None, dw.world_size())
    for _ in range(steps):
        optimizer.zero_grad()
        dw.backward(nn.functional.mse_loss(model(x[mine]), y[mine]))
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    made = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # a gradient near 0 steps little
    return dw.wrap_optimizer(made)


def one_process(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights and the optimizer's state of one process in plain torch."""
    model = net()
    optimizer = adamw(model)
    trained(model, optimizer, steps)
    return model.state_dict(), optimizer.state_dict()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder for what is offloaded; without the operator that DeepSpeed writes by there is nothing to test."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    built = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, timeout=800)
    if built.returncode == CANNOT_BE_BUILT:
        pytest.skip("async_io cannot be built here: it wants a C compiler and libaio (apt-get install libaio-dev)")
    assert built.returncode == 0, built.stderr
    return tmp_path / "disk"


def on_disk(disk: Path, saved: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Train, save, and train on; return the bytes on the disk, and the weights."""
    model = dw.wrap_model(net())
    optimizer = adamw(model)
    trained(model, optimizer, 2)
    dw.save({"model": model, "optimizer": optimizer}, saved)
    trained(model, optimizer, 2)
    size = sum(each.stat().st_size for each in disk.rglob("*") if each.is_file())
    with pytest.raises(ModelError, match="on NVMe, which changes by hand would not reach"), gathered_weights(model):
        pass
    return size, model.state_dict()


def gone_on_with(saved: Path) -> dict[str, torch.Tensor]:
    """Load what was saved, and train on."""
    model = dw.wrap_model(net())
    optimizer = adamw(model)
    dw.load(saved, into={"model": model, "optimizer": optimizer})
    trained(model, optimizer, 2)
    return model.state_dict()


@GUARDED
def test_an_optimizer_on_nvme_trains_as_one_process(disk: Path, tmp_path: Path) -> None:
    """What AdamW keeps and the master copy are on the disk, 12 bytes a weight; a checkpoint is the plain one."""
    weights_in_memory = {"zero_optimization": {"offload_param": {"device": "none"}}}
    strategy = DeepSpeedStrategy(stage=3, offload="nvme", nvme_path=str(disk), config=weights_in_memory)
    saved = tmp_path / "saved.pt"
    found = launch(strategy, on_disk, disk, saved)
    weights, _ = one_process(4)
    for size, each in found:
        assert size >= 12 * WIDTH**2
        assert_close(each, weights)
    loaded = dw.load(saved)
    weights_then, state = one_process(2)
    assert_close(loaded["model"], weights_then)
    for number, kept in state["state"].items():
        assert_close(loaded["optimizer"]["state"][number], kept)
    for each in launch(DeepSpeedStrategy(stage=3, offload="cpu"), gone_on_with, saved):
        assert_close(each, weights)
    with pytest.raises(ModelError, match="AdamW cannot be loaded where DeepSpeed keeps it on NVMe"):
        launch(strategy, gone_on_with, saved)


@GUARDED
def test_weights_in_bfloat16_on_nvme_train_as_in_memory(disk: Path, tmp_path: Path) -> None:
    """All of a model that is trained in bf16 may be there, with the same numbers."""
    strategy = DeepSpeedStrategy(stage=3, offload="nvme", nvme_path=str(disk))
    in_memory = DeepSpeedStrategy(stage=3)
    found = launch(strategy, on_disk, disk, tmp_path / "saved.pt", precision="bf16")
    expected = launch(in_memory, in_memory_in_bf16, precision="bf16")
    for (_, weights), others in zip(found, expected, strict=True):
        assert_close(weights, others)


def in_memory_in_bf16() -> dict[str, torch.Tensor]:
    """Train all four steps, and return the weights."""
    model = dw.wrap_model(net())
    trained(model, adamw(model), 4)
    return model.state_dict()


@pytest.mark.skipif(get_accelerator().is_fp16_supported(), reason="DeepSpeed keeps float32 on NVMe on this device")
def test_weights_in_float32_that_would_be_rounded_are_refused_before_the_start(disk: Path) -> None:
    """DeepSpeed would keep them in bfloat16 there."""
    strategy = DeepSpeedStrategy(stage=3, offload="nvme", nvme_path=str(disk))
    with pytest.raises(PrecisionError, match=r"keeps weights on NVMe in bfloat16 .* Use precision='bf16', or keep"):
        launch(strategy, never)


@pytest.mark.skipif(get_accelerator().is_fp16_supported(), reason="DeepSpeed has float16 here, and the suite tests it")
def test_fp16_is_refused_before_the_start_where_deepspeed_has_none() -> None:
    """With the reason, rather than in the first forward."""
    with pytest.raises(PrecisionError, match=r"no float16 on this processor: that needs AVX512-FP16 or AMX-FP16"):
        launch(DeepSpeedStrategy(stage=2), never, precision="fp16")


def never() -> None:
    """Fail, as the start of a function that is not to run."""
    raise AssertionError("it has started")


def test_a_missing_operator_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what it wants, rather than in the first forward."""
    monkeypatch.setenv("CC", "false")
    strategy = DeepSpeedStrategy(stage=3, offload="nvme", nvme_path=str(tmp_path))
    with pytest.raises(OptionError, match=r"async_io cannot be built on this node: .*libaio.* or use offload='cpu'"):
        launch(strategy, never)
