"""The pretended devices fail programs that real ones fail: each mistake is made here, and seen."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.devices import kinds, transfer
from distwrap.testing import run_ranks
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly

pytestmark = pytest.mark.gpu


def is_pretended() -> bool:
    return accelerator() == "pretend"


def test_tensors_on_the_wrong_device() -> None:
    """A tensor of the CPU beside one of the device, memory that is not the CPU's, and an index that is not there."""
    x = torch.ones(3, device=accelerator())
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(TypeError, match=r"numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match=r"device|ordinal"):
        torch.ones(1, device=f"{accelerator()}:7")
    assert (x + 1.0).sum().item() == 6.0  # numbers may be the CPU's


@in_nightly
@pytest.mark.gpu(2, separate=True)
def test_tensors_of_two_devices() -> None:
    """Two devices do not share memory."""
    first, second = (torch.ones(3, device=f"{accelerator()}:{index}") for index in (0, 1))
    with pytest.raises(RuntimeError, match="same device"):
        first + second
    assert torch.equal(first + second.to(first.device), 2 * first)


def _batches() -> list[torch.Tensor]:
    loader = DataLoader(TensorDataset(torch.arange(64.0).reshape(32, 2)), batch_size=4, pin_memory=True)
    device = torch.device(accelerator(), 0)
    return [batch[0].clone().cpu() for batch in transfer.on_device(loader, device, ahead=True, pinned=True)]


def test_without_the_wait_for_the_copies_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch that is copied on a stream of its own nothing is there until the program's stream has waited."""
    expected = torch.arange(64.0).reshape(32, 2)
    assert torch.equal(torch.cat(_batches()), expected)
    if not is_pretended():
        return  # where numbers may be there by chance
    monkeypatch.setattr(kinds.SideStream, "wait", lambda *_: None)
    assert not torch.equal(torch.cat(_batches()), expected)


@in_nightly
def test_without_a_wait_another_streams_results_are_not_there() -> None:
    """What one stream computes is not in another's reach before that waits; a moment that is reached is."""
    device = torch.device(accelerator(), 0)
    side = kinds.SideStream(device)
    with side.current():
        x = torch.arange(3.0, device=device).mul_(2)
        done = side.moment()
    assert not is_pretended() or not torch.equal(x.cpu(), torch.tensor([0.0, 2.0, 4.0]))
    side.wait(done)
    assert torch.equal(x.cpu(), torch.tensor([0.0, 2.0, 4.0]))
    assert side.reached(done)


def test_memory_that_another_stream_uses_is_not_freed_early() -> None:
    """Freed memory is its stream's next tensor, unless it was said that another stream uses it."""
    device = torch.device(accelerator(), 0)
    side, kept = kinds.SideStream(device), torch.full((1000,), 3.0, device=device)
    ready = side.moment()
    with side.current():
        side.wait(ready)
        pinned = torch.empty(1000, pin_memory=True).copy_(kept, non_blocking=True)
        side.uses(kept)
        done = side.moment()
    del kept
    torch.full((1000,), 4.0, device=device).cpu()  # which takes the memory, where it is free
    side.wait(done)
    torch.accelerator.synchronize()
    assert bool((pinned == 3.0).all())


@in_nightly
@pytest.mark.gpu(2, separate=True)
def test_without_set_device_a_tensor_is_on_device_0() -> None:
    """Each rank's device is its current one; a rank that forgot that has its tensors on the first."""

    def body(forgets: bool) -> int | None:
        if forgets:
            torch.accelerator.set_device_index(0)  # as it is in a new process
        return torch.ones(1, device=accelerator()).device.index

    assert run_ranks(body, 2, False, timeout=60) == [0, 1]
    assert run_ranks(body, 2, True, timeout=60) == [0, 0]


@in_nightly
@pytest.mark.gpu(2, 4, separate=True)
def test_a_tensor_of_the_cpu_in_a_collective_of_devices(devices: int) -> None:
    """The devices' backend takes none, and `reduce` moves it there and back."""

    def body() -> tuple[str, Any]:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        return str(caught.value), dw.reduce(torch.ones(1), "sum")

    for words, total in run_ranks(body, devices, timeout=60):
        assert "cpu" in words.lower()
        assert total.device == torch.device("cpu")
        assert total.item() == devices


@in_nightly
def test_a_process_that_was_forked_from_one_that_used_a_device() -> None:
    """It cannot use one."""
    script = (
        f"import os, torch\ntorch.ones(1, device={accelerator()!r})\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        f"        torch.ones(1, device={accelerator()!r})\n"
        "    except RuntimeError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "forked" in done.stdout


@in_nightly
def test_a_device_has_random_numbers_of_its_own() -> None:
    """Its generator is not the CPU's; a seed gives the same numbers again, also after the state was put back."""
    torch.manual_seed(3)
    on_cpu, first = torch.rand(4), torch.rand(4, device=accelerator())
    state = torch.get_device_module(accelerator()).get_rng_state()
    second = torch.rand(4, device=accelerator())
    torch.get_device_module(accelerator()).set_rng_state(state)
    assert torch.equal(torch.rand(4, device=accelerator()), second)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), on_cpu)
    assert torch.equal(torch.rand(4, device=accelerator()), first)
    assert not torch.equal(first.cpu(), on_cpu)


@in_nightly
def test_marks_of_conjugates_go_with_a_copy() -> None:
    """Numbers that are only marked as conjugate or negative come to the CPU, and from it, as what they are."""
    x = torch.tensor([1 + 2j], device=accelerator())
    assert x.conj().cpu().tolist() == [1 - 2j]
    assert x.conj().imag.cpu().tolist() == [-2.0]
    x.conj().copy_(torch.tensor([3 + 4j]))
    assert x.cpu().tolist() == [3 - 4j]


@in_nightly
def test_no_more_memory_than_there_is() -> None:
    """A tensor that is larger than the device is torch's own error of memory."""
    free, total = torch.get_device_module(accelerator()).mem_get_info()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device=accelerator())


@in_nightly
def test_no_device_is_visible() -> None:
    """A process to which no device is shown is on the CPU."""
    hidden = {"PRETEND_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
    script = "import torch, distwrap as dw; print(dw.distributed(lambda: str(dw.device()))())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | hidden, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "cpu" in done.stdout
