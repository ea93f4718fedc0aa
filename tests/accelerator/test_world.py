"""A world of ranks on accelerators: whose device is which, what is refused, collectives of both kinds of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.devices.kinds import kind_of, kind_of_torch
from distwrap.errors import ForkError, OptionError, WorkerError
from distwrap.testing import run_ranks
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly
from tests.ports import free_port

pytestmark = pytest.mark.gpu

PLACE = """
import json, torch, distwrap as dw
dw.setup_process_group()
own, plain = torch.ones(1, device=dw.device()), torch.ones(1, device=torch.accelerator.current_accelerator())
print(json.dumps([dw.rank(), str(dw.device()), plain.device.index, float(dw.reduce(own, "sum"))]))
dw.teardown_process_group()
"""


def _ranks_by_hand(shown: list[str], port: int) -> list[tuple[int, str, str]]:
    """Run ranks that a cluster has started, each of which is shown some devices; return how each ended."""
    variable = kind_of_torch().visible_by
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PLACE],
            env=os.environ | {
                variable: devices, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(shown)),
                "LOCAL_WORLD_SIZE": str(len(shown)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, devices in enumerate(shown)
    ]  # fmt: skip
    return [(process.wait(60), *process.communicate()) for process in ranks]


@pytest.mark.gpu(2, separate=True)
def test_each_rank_is_shown_one_device() -> None:
    """Then it is number 0 for each of them, and another device."""
    ended = _ranks_by_hand(["0", "1"], free_port())
    assert [code for code, *_ in ended] == [0, 0], ended
    assert [json.loads(out) for _, out, _ in ended] == [[rank, f"{accelerator()}:0", 0, 2.0] for rank in (0, 1)]


@in_nightly
@pytest.mark.gpu(2, separate=True)
def test_all_ranks_are_shown_all_devices() -> None:
    """Then each takes the one of its local rank."""
    ended = _ranks_by_hand(["0,1", "0,1"], free_port())
    assert [json.loads(out) for _, out, _ in ended] == [[rank, f"{accelerator()}:{rank}", rank, 2.0] for rank in (0, 1)]


@pytest.mark.gpu(2, separate=True)
def test_two_ranks_on_one_device() -> None:
    """They are refused, with the device's own name, on both."""
    for code, _, err in _ranks_by_hand(["1", "1"], free_port()):
        assert code != 0
        assert "ranks 0, 1" in err
        assert "are all on the same physical device" in err


@pytest.mark.gpu(2, separate=True)
def test_more_ranks_than_devices() -> None:
    """It is an error before any process starts, and names the variable that shows devices."""
    words = rf"nprocs=3, but this node shows 2 {accelerator()}.*{kind_of_torch().visible_by}"
    with pytest.raises(OptionError, match=words):
        dw.distributed(dw.rank, nprocs=3)()


@pytest.mark.gpu(1, 2, 4, separate=True)
def test_a_rank_for_each_device(devices: int) -> None:
    """``nprocs="auto"`` is as many as there are, each on its own, under the devices' backend."""

    def body() -> tuple[str, str | None]:
        return str(dw.device()), torch.distributed.get_backend() if dw.world_size() > 1 else None

    backend = kind_of_torch().backend() if devices > 1 else None
    assert dw.distributed(returns="all", launcher="forkserver", nprocs=devices)(body)() == [
        (f"{accelerator()}:{rank}", backend) for rank in range(devices)
    ]


def printed_by(script: str) -> str:
    """Run a script in a process of its own, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@in_nightly
@pytest.mark.gpu(2)
def test_a_fork_after_use() -> None:
    """It is refused with the line that has used a device first; another launcher takes its place where it may."""
    script = (
        "import torch, distwrap as dw\n"
        "x = torch.ones(1, device=torch.accelerator.current_accelerator())  # here\n"
        "main = dw.distributed(lambda: str(dw.device()), nprocs=2)\n"
        "print(main.options(launcher='forkserver')())\n"
        "try:\n    main.options(launcher='fork')()\nexcept dw.errors.ForkError as error:\n    print(error)\n"
    )
    told = printed_by(script)
    assert f"{accelerator()}:0" in told
    assert "has initialised an accelerator" in told
    assert "first used at" in told


@in_nightly
@pytest.mark.gpu(2)
def test_a_fork_after_a_backward_on_the_cpu() -> None:
    """Autograd then has threads for the devices, and a forked rank could compute no backward: others are started."""
    script = (
        "import torch, distwrap as dw\n"
        "def train():\n    torch.ones(3, requires_grad=True).sum().backward()\n    return str(dw.device())\n"
        "train()\n"
        "main = dw.distributed(train, nprocs=2)\n"
        "print(main())\n"
        "try:\n    main.options(launcher='fork')()\nexcept dw.errors.ForkError as error:\n    print(error)\n"
    )
    told = printed_by(script)
    assert told.startswith(f"{accelerator()}:0\n")
    assert "has computed a backward on a node with accelerators" in told


@pytest.mark.gpu(2, 4)
def test_collectives_of_both_memories(devices: int) -> None:
    """Tensors of the device and of the CPU in one run: each comes back where it was, and objects on the own device."""

    def body() -> list[Any]:
        plain = torch.full((2,), float(dw.rank()))
        own = plain.to(dw.device())
        found: dict[str, Any] = {
            "gather": (dw.gather(own), dw.gather(plain)),
            "reduce": (dw.reduce(own, "sum"), dw.reduce(plain, "max")),
            "mean": (dw.mean(own), dw.mean(plain)),
            "broadcast": dw.broadcast((own, plain, {"more": [own]}), src=dw.world_size() - 1),
            "objects": dw.gather_object({"own": own, "plain": plain, "parameter": torch.nn.Parameter(own)}),
        }
        assert dw.agree(dw.rank() == 0)
        assert not dw.agree(dw.rank() == 0, "all")
        dw.barrier()
        devices = {name: sorted({str(t.device) for t in _tensors(value)}) for name, value in found.items()}
        both = ["cpu", str(dw.device())]
        assert devices == dict.fromkeys(found, both), devices
        assert all(type(each["parameter"]) is torch.nn.Parameter for each in found["objects"])
        return [[t.tolist() for t in _tensors(value)] for value in found.values()]

    found = run_ranks(body, devices, timeout=100)
    ranks = [float(rank) for rank in range(devices)]
    pairs = [rank for rank in ranks for _ in range(2)]
    last, middle = [ranks[-1]] * 2, [sum(ranks) / devices] * 2
    expected = [
        [pairs, pairs],
        [[sum(ranks)] * 2, last],
        [middle, middle],
        [last, last, last],
        [[rank] * 2 for rank in ranks for _ in range(3)],
    ]
    assert all(each == expected for each in found)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.gpu(2)
def test_arguments_and_results_on_a_device() -> None:
    """They come out on the CPU: the caller's device is one rank's."""

    def body(x: torch.Tensor) -> tuple[str, torch.Tensor]:
        return str(x.device), x.to(dw.device()) + dw.rank()

    for rank, (where, value) in enumerate(run_ranks(body, 2, torch.ones(1, device=accelerator()), timeout=60)):
        assert where == "cpu"
        assert value.device.type == "cpu"
        assert value.item() == 1 + rank


@pytest.mark.gpu(2)
def test_a_failure_on_a_device_is_told() -> None:
    """A device's own error comes to the caller as any other."""

    def body() -> None:
        if dw.rank() == 1:
            torch.ones(1, device=f"{accelerator()}:9")
        dw.barrier()

    with pytest.raises((RuntimeError, WorkerError), match=r"ordinal|device"):
        run_ranks(body, 2, timeout=60)


@in_nightly
@pytest.mark.gpu(1, 4)
def test_the_doctors_devices(devices: int) -> None:
    """It shows them, uses them in its test, and has nothing to say against them."""
    done = subprocess.run(
        [sys.executable, "-m", "distwrap", "doctor"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{devices} {accelerator()} device(s) visible" in done.stdout
    assert kind_of_torch().backend() in done.stdout
    for index in range(devices):
        name = kind_of(accelerator()).unique_name(torch.device(accelerator(), index))
        assert name is not None
        assert name in done.stdout
    assert "No problems found" in done.stdout


@pytest.mark.gpu(2)
def test_forking_is_refused_by_name() -> None:
    """Where a fork is asked for, and a device is in use in this process."""
    torch.ones(1, device=accelerator())
    with pytest.raises(ForkError, match="has initialised an accelerator"):
        dw.distributed(nprocs=2, launcher="fork")(dw.rank)()
