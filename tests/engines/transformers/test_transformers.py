"""Trainer and Accelerate train once under distwrap's launchers, and distwrap's helpers train beside them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distwrap import distributed
from tests.engines.transformers import program

ROOT = Path(__file__).parents[3]


@functools.cache
def one_process(way: str) -> tuple[float, ...]:
    """Return the weights of one process, in a process of its own."""
    command = [sys.executable, "-c", f"from {program.__name__} import *; print('TOLD', by_{way}(1))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "TOLD" in done.stdout, done.stderr
    return tuple(json.loads(done.stdout.partition("TOLD ")[2].splitlines()[0]))


@pytest.mark.parametrize("launcher", ["forkserver", "spawn"])
@pytest.mark.parametrize("ways", [["trainer"], ["accelerate"], ["trainer", "distwrap", "accelerate", "distwrap"]])
def test_each_trains_once(ways: list[str], launcher: str) -> None:
    """Alone and side by side in the same ranks, each ends with the weights of one process."""
    for found in distributed(nprocs=2, launcher=launcher, timeout=100, returns="all")(program.main)(ways):
        for way in ways:
            assert found[way] == pytest.approx(one_process(way), abs=1e-5), way


@pytest.mark.parametrize(
    "command",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"],
    ],
)
def test_their_launchers_and_the_same_script(command: list[str]) -> None:
    """Under torchrun and accelerate launch the decorator joins, and each trains once."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, "-m", *command, program.__file__], env=env, capture_output=True, text=True, timeout=110
    )
    told = [json.loads(line.partition("TOLD ")[2]) for line in done.stdout.splitlines() if "TOLD " in line]
    assert len(told) == 2, done.stdout + done.stderr
    for found in told:
        for way, weights in found.items():
            assert weights == pytest.approx(one_process(way), abs=1e-5), way
