"""Ends of programs on devices, and of their processes, that once came late, or not at all."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Pipe

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import CollectiveError
from distwrap.launch.outcome import success
from distwrap.launch.worker import PipeLink
from tests.accelerator import accelerator
from tests.accelerator.marks import in_nightly

pytestmark = pytest.mark.gpu


def _one_leaves_early() -> None:
    model = dw.wrap_model(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1 and dw.rank() == 1:
            return
        model(torch.ones(2, 4, device=dw.device())).sum().backward()
        optimizer.step()


@in_nightly
@pytest.mark.gpu(2)
def test_a_rank_that_leaves_early_under_elastic() -> None:
    """The others are told at once which rank they wait for, though its process lives until all are done."""
    with pytest.raises(CollectiveError, match="waited in a collective for rank 1, which had left the function"):
        dw.distributed(nprocs=2, launcher="elastic", timeout=50)(_one_leaves_early)()


@in_nightly
def test_forks_while_threads_use_the_device() -> None:
    """A fork can free tensors, whatever other threads did at that moment, and is refused their numbers."""
    script = f"""
import os, signal, sys, threading, torch
def work():
    x = torch.ones(8, device={accelerator()!r})
    while True:
        x * 2
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
for _ in range(200):
    tensor = torch.ones(8, device={accelerator()!r})
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        del tensor
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        os._exit(1)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    try:
        torch.ones(8, device={accelerator()!r})
    except RuntimeError:
        os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=100, check=False).returncode == 0


@in_nightly
def test_the_fork_server_ends_at_once() -> None:
    """When its caller is gone, it does not take an interpreter's way out, in which its ranks would go on."""
    script = """
import atexit, socket
from distwrap.launch.server import serve
caller, ours = socket.socketpair()
atexit.register(print, "late")
caller.close()
serve(ours.detach())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stdout


def test_a_rank_whose_caller_is_gone() -> None:
    """Its report reaches nobody, and is no failure of the rank."""
    theirs, ours = Pipe()
    theirs.close()
    PipeLink(ours).report(success(0, None))
