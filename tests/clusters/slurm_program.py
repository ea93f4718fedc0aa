"""A user's script on a login node: it submits itself as a Slurm job, and prints what comes home.

Usage: slurm_program.py KIND [the folder of logs]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.launch import slurm_job
from distwrap.launch.slurm import SlurmLauncher


class OwnError(Exception):
    """Exception of this script's, which only it knows."""


def trained() -> list[float]:
    """Train by this rank's rows, and return the weights."""
    torch.manual_seed(3)
    x, y, net = torch.randn(8, 5), torch.randn(8, 3), nn.Linear(5, 3)
    model = dw.wrap_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[dw.rank() :: dw.world_size()]), y[dw.rank() :: dw.world_size()]).backward()
        optimizer.step()
    return [float(each) for each in net.weight.detach().flatten()]


def main(kind: str) -> Any:
    """Do on a rank what the kind says."""
    place = dw.placement()
    print(f"rank {place.rank} of {place.world_size} is there", flush=True)
    if kind == "train":
        sys.stdout.write(f"last words of {place.rank}")
    if kind == "raise" and place.rank == 1:
        raise OwnError("out of cheese", 3)
    if kind.startswith("die") and place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "all die":
        dw.barrier()  # who still joins would tell of the other's end
        os.kill(os.getpid(), signal.SIGKILL)
    if kind in ("hang", "orphan", "die while another computes"):
        time.sleep(100)
    return [place.node_rank, place.local_rank, place.nnodes, trained()]


def launcher(kind: str) -> Any:
    """Return the launcher of a kind of run."""
    if kind == "no room":
        return SlurmLauncher(nodes=2, cpus=4, wait=4, parameters={"begin": "now+1hour"})
    if kind == "refused":
        return "slurm(partition='nowhere')"
    if kind in ("one rank", "die while another computes"):
        return SlurmLauncher()
    return SlurmLauncher(nodes=2, orphan_seconds=4 if kind == "orphan" else 60)


if __name__ == "__main__":
    kind = sys.argv[1]
    nprocs = {"train": 4, "one rank": 1}.get(kind, 2)
    slurm_job._FILE_SECONDS = 1.0  # the nodes' files are on this very machine
    try:
        logs = sys.argv[2] if len(sys.argv) > 2 else None
        options = {"launcher": launcher(kind), "returns": "all", "timeout": 30, "log_dir": logs}
        value = distributed(nprocs=nprocs, **options)(main)(kind)
        print("TOLD " + json.dumps({"value": value}))
    except KeyboardInterrupt:
        print("TOLD " + json.dumps({"value": "interrupted"}))
    except Exception as error:  # noqa: BLE001 - of every kind
        print("TOLD " + json.dumps({"error": type(error).__name__, "text": f"{error}\n{error.__cause__}"}))
