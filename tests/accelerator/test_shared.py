"""Two and four ranks on one device, NCCL with one rank, and what goes wrong on a device: all that one GPU can show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.devices.kinds import SideStream, kind_of_torch
from distwrap.errors import OptionError, WorkerError
from distwrap.model.wrapped_models import bound_strategy
from distwrap.testing import simulate
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly
from tests.accelerator.test_equality import STEPS, alone, assert_near, data, net
from tests.gpu_report import readme_program

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SHARED: dict[str, Any] = {"share_devices": True, "launcher": "forkserver", "returns": "all", "timeout": 60}


def trained(split: bool) -> tuple[str, list[list[float]]]:
    """Train, on this rank's share or on all ranks' one batch; return the device and the whole weights."""
    model = dw.wrap_model(net())
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    for step in range(STEPS):
        x, y = (part.to(dw.device()) for part in data(step, dw.rank() if split else 0))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = bound_strategy(model).state(model, everywhere=True)
    weights = [value.cpu().flatten().tolist() for value in state.values()]
    return str(dw.device()), weights


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 2),
        ("zero1", 2),
        ("fsdp", 2),
        pytest.param("fsdp(cpu_offload=True)", 2, marks=pytest.mark.cuda),
        ("fsdp(shard=2)", 4),
    ],
)
def test_strategies_of_ranks_that_share_are_one_process(strategy: str, ranks: int) -> None:
    """Two and four ranks on one device give the weights of one process on the CPU, in float64."""
    main = dw.distributed(strategy=strategy, nprocs=ranks, **SHARED)(trained)
    for device, weights in main(True):
        assert device == f"{accelerator()}:0"
        assert_near(weights, alone(ranks))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_simulated_ranks_on_the_device(strategy: str) -> None:
    """Ranks of one process, on the device that there is, where a simulation has one: also a pipeline."""
    split = strategy != "pipeline"
    for device, weights in simulate(trained, 2, split, strategy=strategy):
        assert device == (f"{accelerator()}:0" if accelerator() == "cuda" else "cpu")
        assert_near(weights, alone(2 if split else 1))


def test_without_the_word_ranks_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one device are refused before a process starts, and the error says the word."""
    monkeypatch.delenv("DISTWRAP_SHARE_DEVICES", raising=False)
    with pytest.raises(OptionError, match=r"nprocs=2, but this node shows 1 .*share_devices=True"):
        dw.distributed(dw.rank, nprocs=2)()


@pytest.mark.cuda
def test_nccl_takes_no_shared_device() -> None:
    """The error says so before NCCL does."""
    with pytest.raises(OptionError, match="NCCL takes no two ranks on one GPU"):
        dw.distributed(dw.rank, nprocs=2, backend="nccl", **SHARED)()


BY_NCCL = """
import json, torch, torch.distributed as dist, distwrap as dw
from tests.accelerator.test_shared import trained
main = dw.distributed(lambda: [trained(True), dist.get_backend(), dw.reduce(torch.ones(2), "sum").tolist()])
print(json.dumps(main()))
"""


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nccl_with_one_rank(strategy: str, tmp_path: Path) -> None:
    """torchrun's one rank has a group of NCCL, and trains as one process does."""
    script = tmp_path / "by_nccl.py"
    script.write_text(BY_NCCL)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DISTWRAP_STRATEGY": strategy},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (device, weights), backend, ones = json.loads(done.stdout)
    assert (device, backend, ones) == ("cuda:0", "nccl", [1.0, 1.0])
    assert_near(weights, alone(1))


def _programs() -> dict[str, list[str]]:
    return {
        "README's": [readme_program()],
        "examples/digits.py": [(ROOT / "examples/digits.py").read_text(), "--epochs", "1", "--out", "digits.pt"],
    }


@in_nightly
@pytest.mark.parametrize("name", ["README's", "examples/digits.py"])
def test_programs_give_what_they_give_on_the_cpu(name: str, tmp_path: Path) -> None:
    """On the device, with one and with two ranks: the printed numbers, and the weights that are saved, to 1e-5."""
    text, *words = _programs()[name]
    (tmp_path / "program.py").write_text(text)
    hidden = {kind_of_torch().visible_by: ""}
    printed: list[list[float]] = []
    saved: list[dict[str, torch.Tensor]] = []
    for ranks, where in (("1", hidden), ("1", {}), ("2", {"DISTWRAP_SHARE_DEVICES": "1"})):
        done = subprocess.run(
            [sys.executable, "-c", EXACT, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "DISTWRAP_NPROCS": ranks, **where},
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append([float(number) for number in re.findall(r"\d\.\d+", done.stdout)])
        if words:
            saved.append(torch.load(tmp_path / "digits.pt", weights_only=True))
    assert printed[0] == pytest.approx(printed[1], abs=1e-4) == printed[2]
    for weights in saved[1:]:
        for key, value in saved[0].items():
            torch.testing.assert_close(weights[key].cpu(), value, atol=1e-5, rtol=0)


# cuDNN's convolutions round to 10 bits by default (TF32), which is no fault of ours.
EXACT = """
import runpy, sys, torch
torch.use_deterministic_algorithms(True)
torch.backends.cudnn.allow_tf32 = False
sys.argv[0] = "program.py"
runpy.run_path("program.py", run_name="__main__")
"""


def test_a_launch_after_the_device_was_used() -> None:
    """A fork is not safe any more, and the fork server's ranks take its place without a word."""
    torch.ones(1, device=accelerator())
    found = dw.distributed(nprocs=2, share_devices=True, returns="all", timeout=60)(lambda: str(dw.device()))()
    assert found == [f"{accelerator()}:0"] * 2


def _fails(how: str) -> None:
    if dw.rank() == 1:
        if how == "memory":
            torch.empty(
                2 * torch.get_device_module(accelerator()).mem_get_info()[1], dtype=torch.uint8, device=accelerator()
            )
        elif how == "access":
            torch.zeros(4, device=accelerator())[torch.tensor([10**9], device=accelerator())].sum().item()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(2, device=accelerator())
    dist.all_reduce(total)
    total.sum().item()


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("memory", torch.OutOfMemoryError, "(?s)rank 1.*memory"),
        pytest.param("access", RuntimeError, "(?s)rank 1.*assert", marks=pytest.mark.cuda),
        ("kill", WorkerError, "rank 1.*SIGKILL"),
    ],
)
def test_one_rank_fails_on_the_device(how: str, kind: type[Exception], words: str) -> None:
    """Its error comes to the caller with its rank, while the other waits in a collective; both end."""
    with pytest.raises(kind) as caught:
        dw.distributed(nprocs=2, **SHARED)(_fails)(how)
    assert re.search(words, "".join(traceback.format_exception(caught.value)))


@pytest.mark.cuda
def test_copies_ahead_need_their_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that the device comes to late is waited for; without the wait the batches are wrong."""
    rows = torch.arange(2.0**20).reshape(16, -1)
    current = SideStream.current

    @contextmanager
    def late(side: SideStream) -> Iterator[None]:
        with current(side):
            torch.cuda._sleep(20_000_000)  # cycles, some ten milliseconds
            yield

    monkeypatch.setattr(SideStream, "current", late)
    assert torch.equal(_batches(rows), rows)
    monkeypatch.setattr(SideStream, "wait", lambda *_: None)
    assert not torch.equal(_batches(rows), rows)


def _batches(rows: torch.Tensor) -> torch.Tensor:
    loader: Any = DataLoader(TensorDataset(rows), batch_size=4, pin_memory=True)
    loader = dw.shard_loader(loader, device=accelerator(), copy_ahead=True)
    return torch.cat([batch.clone() for (batch,) in loader]).cpu()
