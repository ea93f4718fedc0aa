"""Whole trainings by Horovod, under distwrap's launchers and under horovodrun, against one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import CollectiveError, CollectiveTimeoutError, OptionError, WorkerDiedError
from distwrap.strategies.horovod import HorovodStrategy
from tests.engines.horovod import program
from tests.engines.regression import data, net, trained

ROOT = Path(__file__).parents[3]


def one_process() -> torch.Tensor:
    """Return the weights of one process in plain torch."""
    model = net()
    trained(model, torch.optim.Adam(model.parameters(), lr=0.05))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def vector(strategy: Any, **options: Any) -> list[torch.Tensor]:
    """Return the weights of all ranks after a training."""
    return distributed(strategy=strategy, returns="all", timeout=60, **options)(program.main)()


@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("nprocs", [2, 3])
def test_weights_are_those_of_one_process(nprocs: int, launcher: str) -> None:
    """The loop is the same, and so are the numbers."""
    for weights in vector("horovod", nprocs=nprocs, launcher=launcher):
        torch.testing.assert_close(weights, one_process(), rtol=0, atol=1e-5)


def test_predivide_changes_nothing_but_rounding() -> None:
    """Divided in part before the sum and in part after it, a mean is a mean."""
    for weights in vector("horovod(predivide=2.0)", nprocs=2):
        torch.testing.assert_close(weights, one_process(), rtol=0, atol=1e-5)


def test_float16_on_the_way() -> None:
    """Rounded gradients: near the weights of one process, not the same, and alike on all ranks."""
    first, second = vector("horovod(compression='fp16')", nprocs=2)
    assert torch.equal(first, second)
    assert not torch.equal(first, one_process())
    torch.testing.assert_close(first, one_process(), rtol=0, atol=0.02)


@pytest.mark.parametrize("kind", ["sum beyond float16", "bfloat16"])
def test_numbers_that_horovod_cannot_add(kind: str) -> None:
    """A mean of large gradients is finite in float16 too, and weights in bfloat16 train."""
    strategy = "horovod(compression='fp16')" if kind == "sum beyond float16" else "horovod"

    @distributed(strategy=strategy, nprocs=2, timeout=60)
    def main() -> float:
        net = nn.Linear(1, 1, bias=False)
        model = dw.wrap_model(net.bfloat16() if kind == "bfloat16" else net)
        (model(torch.ones(1, 1, dtype=net.weight.dtype)) * 5e4).sum().backward()
        return float(net.weight.grad)  # type: ignore[arg-type]

    assert main() == pytest.approx(5e4, rel=1e-2)


def test_windows_exchange_once() -> None:
    """`accumulate` is Horovod's backward_passes_per_step: the gradients of a window are summed here, sent once."""

    @distributed(strategy="horovod", nprocs=2, timeout=60)
    def main() -> tuple[torch.Tensor, int]:
        import horovod.torch as hvd

        calls = 0
        plain = hvd.allreduce_async_

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return plain(*args, **kwargs)

        hvd.allreduce_async_ = counted
        model = dw.wrap_model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = data()
        mine = slice(dw.rank(), None, 2)
        halves = [(x[mine][part], y[mine][part]) for part in (slice(0, 3), slice(3, 6))]
        for (x, y), window in dw.accumulate(halves, 2, model):
            (nn.functional.mse_loss(model(x), y) / window.size).backward()
            if window.last:
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), calls

    weights, calls = main()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = data()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(weights, nn.utils.parameters_to_vector(model.parameters()), rtol=0, atol=1e-5)
    assert calls == 1  # one bucket, once


def test_horovodrun_and_the_same_script() -> None:
    """Ranks that horovodrun has started join, and Horovod takes its own way to meet."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["horovodrun", "-np", "2", "--gloo", sys.executable, program.__file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    told = [json.loads(line.partition("TOLD ")[2]) for line in done.stdout.splitlines() if "TOLD " in line]
    assert len(told) == 2, done.stdout + done.stderr
    for weights in told:
        torch.testing.assert_close(torch.tensor(weights), one_process(), rtol=0, atol=1e-5)


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed")
def test_mpirun_and_the_same_script() -> None:
    """Horovod without MPI of its own meets by what rank 0 serves."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["mpirun.openmpi", "-np", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, program.__file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    told = [json.loads(line.partition("TOLD ")[2]) for line in done.stdout.splitlines() if "TOLD " in line]
    assert len(told) == 2, done.stdout + done.stderr
    for weights in told:
        torch.testing.assert_close(torch.tensor(weights), one_process(), rtol=0, atol=1e-5)


def test_two_calls_after_each_other() -> None:
    """Horovod begins anew in each run."""
    for _ in range(2):
        assert len(vector("horovod", nprocs=2)) == 2


@pytest.mark.parametrize("kind", ["dies", "raises", "leaves", "stays away"])
def test_a_rank_that_ends_is_named(kind: str) -> None:
    """The others do not wait in Horovod for one that comes no more."""

    @distributed(strategy="horovod", nprocs=3, timeout=10)
    def main() -> None:
        model = dw.wrap_model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trained(model, optimizer)
        if dw.rank() == 1:
            if kind == "dies":
                os.kill(os.getpid(), 9)
            if kind == "raises":
                raise KeyError("boom")
            if kind == "stays away":
                time.sleep(90)
            return
        trained(model, optimizer)

    errors: dict[str, Any] = {"dies": WorkerDiedError, "raises": KeyError, "leaves": CollectiveError}
    with pytest.raises(errors.get(kind, CollectiveTimeoutError)) as caught:
        main()
    assert "rank 1" in f"{caught.value}{caught.value.__cause__}"


def test_what_cannot_be_is_refused() -> None:
    """Before a process starts, or where the ranks meet."""
    with pytest.raises(OptionError, match="Adasum has no predivide"):
        HorovodStrategy(adasum=True, predivide=2.0)
    with pytest.raises(OptionError, match=r"HorovodStrategy\(scale_lr=…\): .* lr=0.01 \* world_size"):
        HorovodStrategy(scale_lr=True)
    with pytest.raises(OptionError, match="positive number"):
        HorovodStrategy(predivide=0)
    with pytest.raises(OptionError, match="compression"):
        HorovodStrategy(compression="bf16")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="leave comm"):
        distributed(strategy="horovod", comm="bytegrad", nprocs=2)(program.main)()
    with pytest.raises(OptionError, match="leave comm"):
        HorovodStrategy(comm="bytegrad")
    with pytest.raises(OptionError, match="built without MPI and without NCCL"):
        distributed(strategy="horovod(adasum=True)", nprocs=2, timeout=60)(program.main)()
