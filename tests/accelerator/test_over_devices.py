"""One process over several devices: DataParallel, and ddp2 on two nodes of two devices each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.devices.kinds import kind_of_torch
from distwrap.errors import ModelError
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly
from tests.accelerator.test_equality import STEPS, alone, assert_near, data, net
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu


class Seeing(nn.Module):
    """A net that notes on which devices it was run."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = net(), set[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(str(x.device))
        found: torch.Tensor = self.net(x)
        return found


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL")  # torch's, of gradients that it adds up
@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
@pytest.mark.gpu(1, 2, 4, separate=True)
def test_data_parallel(devices: int, strategy: str) -> None:
    """On one node each device computes its share of the batch, and the weights are those of one process."""

    def body() -> tuple[set[str], list[Any]]:
        inner = Seeing()
        model = dw.wrap_model(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            x, y = data(step, 0)
            nn.functional.mse_loss(model(x), y.to(dw.device())).backward()
            optimizer.step()
            optimizer.zero_grad()
        return inner.seen, [parameter.detach().cpu().flatten().tolist() for parameter in inner.parameters()]

    seen, weights = dw.distributed(strategy=strategy, launcher="forkserver", timeout=60)(body)()
    assert seen == {f"{accelerator()}:{index}" for index in range(devices)}
    assert_near(weights, alone(1))


@in_nightly
@pytest.mark.gpu(2, separate=True)
@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
def test_devices_over_which_torch_divides_nothing(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error that names the way out."""
    monkeypatch.delattr(torch._C, "_scatter")
    words = (
        r"over the 2 \w+ devices by torch's DataParallel, which torch does not have for this type of device. "
        r"Use strategy='ddp'"
    )
    with pytest.raises(ModelError, match=words):
        dw.distributed(strategy=strategy, nprocs=1)(lambda: dw.wrap_model(net()))()


@in_nightly
@pytest.mark.gpu(4, separate=True)
@pytest.mark.parametrize("comm", ["allreduce", "local_sgd(sync_every=1)"])
def test_two_nodes_of_two_devices(comm: str, tmp_path: Path) -> None:
    """Under ``strategy="ddp2"`` a node is one process over its two devices; gradients or weights go between nodes."""
    port = free_port()
    words = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d"]
    program = ["--rdzv-id=x", "--local-addr=127.0.0.1", "-m", "tests.accelerator.over_devices", str(tmp_path), comm]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, *program],
            env=os.environ | {kind_of_torch().visible_by: shown}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for shown in ("0,1", "2,3")
    ]  # fmt: skip
    ended = [(node.communicate(timeout=100)[0], node.returncode) for node in nodes]
    assert [code for _, code in ended] == [0, 0], ended
    for rank in range(2):
        weights, seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == [2, 2, True]
        assert_near(weights, alone(2))
