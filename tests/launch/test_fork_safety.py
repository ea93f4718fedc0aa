"""fork refuses, with reasons, where it would not be safe."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import distwrap as dw
from distwrap import distributed
from distwrap.devices import kinds, selection
from distwrap.devices.kinds import CPU
from distwrap.errors import ForkError
from distwrap.launch import fork_safety, openmp
from distwrap.versions import TORCH_RELEASE
from tests.interpreters import run_python


def test_other_threads_are_named() -> None:
    """With another Python thread at work fork refuses, and names it."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="prefetcher")
    thread.start()
    try:
        with pytest.raises(ForkError, match=r"other threads are at work \(prefetcher\).*forkserver"):
            distributed(nprocs=2, launcher="fork")(dw.rank)()
        assert distributed(nprocs=2, launcher="auto")(dw.world_size)() == 2
        assert distributed(nprocs=2, launcher="forkserver")(dw.world_size)() == 2
        assert distributed(strategy="dp", launcher="fork", max_restarts=1)(dw.world_size)() == 1
    finally:
        stop.set()
        thread.join()


def test_a_progress_bars_thread_is_no_reason() -> None:
    """The thread of tqdm that looks at bars sleeps: a program with a bar takes the launcher that it takes without."""
    stop = threading.Event()
    monitor = type("TMonitor", (threading.Thread,), {"__module__": "tqdm._monitor"})(target=stop.wait)
    monitor.start()
    try:
        assert fork_safety.refusal() is None
        assert distributed(nprocs=2, launcher="fork")(dw.world_size)() == 2
    finally:
        stop.set()
        monitor.join()


def test_used_accelerator_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA initialised fork refuses, and says where that was."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setitem(kinds._first_uses, "cuda", '  File "train.py", line 3, in <module>\n')
    assert "train.py" in (fork_safety.refusal() or "")
    with pytest.raises(ForkError, match="has initialised an accelerator"):
        distributed(nprocs=2, launcher="fork")(dw.rank)()


def test_a_driver_that_counting_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where counting the devices starts the driver, "auto" takes another launcher than fork."""
    started: list[bool] = []

    class CountedByDriver(CPU):
        def count(self) -> int:
            started.append(True)
            return 0

    monkeypatch.setattr(selection, "kind_of_torch", CountedByDriver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(started))
    assert distributed(nprocs=2)(dw.world_size)() == 2
    assert started


@pytest.mark.cuda
def test_used_accelerator_is_found(tmp_path: Path) -> None:
    """The line that initialised CUDA is in the refusal."""
    script = tmp_path / "uses_cuda.py"
    for use in ("x = torch.zeros(1).cuda()  # here", "torch.cuda.is_available()"):
        script.write_text(
            f"import torch, distwrap as dw\n{use}\n"
            "from distwrap.launch import fork_safety\n"
            "print(fork_safety.refusal())\n"
        )
        done = run_python(script, timeout=100)
        assert "has initialised an accelerator" in done.stdout
        assert "# here" not in use or "x = torch.zeros(1).cuda()  # here" in done.stdout


def test_fork_after_a_kernel_with_several_threads() -> None:
    """Forked after a multi-threaded kernel, ranks compute with several threads and do not hang."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    a = torch.randn(900, 900)

    @distributed(nprocs=2, launcher="fork", timeout=20, returns="all")
    def multiply(threads: int) -> float:
        torch.set_num_threads(threads)
        return float((a @ a).sum())

    try:
        expected = float((a @ a).sum())
        for count in (1, 2) if openmp.pause() else (1,):  # which is what ranks get where it cannot be paused
            for value in multiply(count):
                assert value == pytest.approx(expected, rel=1e-3)
        assert float((a @ a).sum()) == pytest.approx(expected, rel=1e-3)
    finally:
        torch.set_num_threads(threads)
        openmp.pause()


def test_openmp_can_be_paused() -> None:
    """The OpenMP runtime that torch loaded can be paused here."""
    if TORCH_RELEASE < (2, 7):
        pytest.skip("the OpenMP in wheels of torch 2.6 cannot be paused: forked ranks get one thread")
    assert openmp.pause()
