"""Ways to launch ranks, each in a process of its own that waits for the signal to start.

`launch.py` starts this file once for each way. What a way needs is imported before the clock runs, and inside its
function alone, so that no way pays for another's imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from ports import free_port

Launch = Callable[[], object]
ADDRESS = "127.0.0.1"


class Contender:
    """Handle of a fresh process that launches ranks in one way."""

    def __init__(self, way: str, nprocs: int) -> None:
        self._conn, theirs = Pipe()
        command = [sys.executable, os.path.abspath(__file__), way, str(nprocs), str(theirs.fileno())]
        env = {**os.environ, "DISTWRAP_QUIET": "1"}
        self._complaints = TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stdout=subprocess.DEVNULL, stderr=self._complaints, env=env
        )
        theirs.close()
        self._hear(120)  # that it is ready

    def launch(self) -> float:
        """Launch once; return the seconds from before the call to its return."""
        self._conn.send("go")
        seconds: float = self._hear(120)
        return seconds

    def close(self) -> None:
        """End the process."""
        self._conn.close()
        self._process.wait(30)
        self._complaints.close()

    def _hear(self, limit: float) -> Any:
        if self._conn.poll(limit):
            with contextlib.suppress(EOFError):
                return self._conn.recv()
        self._process.kill()
        self._process.wait(30)
        self._complaints.seek(0)
        complaint = self._complaints.read().decode(errors="replace")
        raise RuntimeError(f"the launch gave no answer within {limit:.0f} s:\n{complaint}")


def first_launch(way: str, nprocs: int) -> float:
    """Time the first launch of a fresh process, which has its imports behind it."""
    contender = Contender(way, nprocs)
    try:
        return contender.launch()
    finally:
        contender.close()


def body() -> float:
    """Run on every rank: one collective, as proof that the group is there."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def distwrap_launch(launcher: str, nprocs: int) -> Launch:
    import distwrap

    for name in distwrap.__all__:
        getattr(distwrap, name)  # imports its module, which a launch would do else
    return distwrap.distributed(nprocs=nprocs, launcher=launcher)(body)


def torch_spawn(nprocs: int) -> Launch:
    """Launch as a tutorial on DDP does: `torch.multiprocessing.spawn` and `init_process_group`."""
    import torch.multiprocessing as mp

    def launch() -> None:
        mp.spawn(_spawned, args=(nprocs, free_port()), nprocs=nprocs)

    return launch


def _spawned(rank: int, nprocs: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS}:{port}", rank=rank, world_size=nprocs)
    body()
    dist.destroy_process_group()


def raw_fork(nprocs: int) -> Launch:
    """Launch by fork with the least code: fork, meet at a store on loopback, run, send rank 0's value, leave."""
    limit = timedelta(seconds=60)

    def launch() -> object:
        store = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False, timeout=limit)
        readable, writable = os.pipe()
        children = [os.fork() or _forked(rank, nprocs, store.port, writable) for rank in range(nprocs)]
        os.close(writable)
        with open(readable, "rb") as pipe:
            value = pickle.loads(pipe.read())
        for child in children:
            assert os.waitpid(child, 0)[1] == 0, "a forked rank failed"
        return value

    return launch


def _forked(rank: int, nprocs: int, port: int, writable: int) -> int:
    code = 1
    try:
        store = dist.TCPStore(ADDRESS, port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nprocs)
        value = body()
        if rank == 0:
            os.write(writable, pickle.dumps(value))
        dist.destroy_process_group()
        code = 0
    finally:
        os._exit(code)


def fabric(strategy: str, nprocs: int) -> Launch:
    from lightning.fabric import Fabric

    leave = strategy == "ddp_spawn"  # Fabric leaves the group open, and spawned ranks now and then abort over it

    def launch() -> object:
        return Fabric(accelerator="cpu", devices=nprocs, strategy=strategy).launch(_in_fabric, leave)

    return launch


def _in_fabric(_: object, leave: bool) -> float:
    value = body()
    if leave:
        dist.destroy_process_group()
    return value


def accelerate(nprocs: int) -> Launch:
    from accelerate import debug_launcher

    return lambda: debug_launcher(_in_accelerate, num_processes=nprocs)


def _in_accelerate() -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True)
    body()


def torchrunx(nprocs: int) -> Launch:
    from torchrunx import Launcher

    return lambda: Launcher(hostnames=["localhost"], workers_per_host=nprocs, backend="gloo").run(body)


# name: the package it needs, and how to make ready for its launches
WAYS: dict[str, tuple[str, Callable[[int], Launch]]] = {
    "distwrap forkserver": ("distwrap", lambda nprocs: distwrap_launch("forkserver", nprocs)),
    "distwrap fork": ("distwrap", lambda nprocs: distwrap_launch("fork", nprocs)),
    "distwrap spawn": ("distwrap", lambda nprocs: distwrap_launch("spawn", nprocs)),
    "torch.multiprocessing.spawn": ("torch", torch_spawn),
    "raw os.fork": ("torch", raw_fork),
    "Fabric ddp_spawn": ("lightning", lambda nprocs: fabric("ddp_spawn", nprocs)),
    "Fabric ddp_fork": ("lightning", lambda nprocs: fabric("ddp_fork", nprocs)),
    "Accelerate debug_launcher": ("accelerate", accelerate),
    "torchrunx": ("torchrunx", torchrunx),
}


def installed(way: str) -> bool:
    """Return whether the package that a way needs is installed."""
    return find_spec(WAYS[way][0]) is not None


def main(way: str, nprocs: int, fd: int) -> None:
    """Get ready, tell the benchmark, and launch at each of its signals."""
    conn = Connection(fd)
    launch = WAYS[way][1](nprocs)
    conn.send("ready")
    with contextlib.suppress(EOFError):
        while conn.recv():
            start = time.perf_counter()
            launch()
            conn.send(time.perf_counter() - start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
