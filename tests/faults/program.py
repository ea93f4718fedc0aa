"""A user's program with a fault in it: trains a little, and breaks where it is told to.

python program.py LAUNCHER WHO FAULT WHEN
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import distwrap as dw

# The folder that holds this package, where this file is a script of its own.
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.faults.cells import FORKS, SIGNALS, Cell, loop_limit

STRUCK = "struck"  # a file, in which the moment of the fault is written
LINGER = 30.0  # seconds for which those who are not at fault go on, if nobody stops them


class Unpicklable(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def _break_on_arrival() -> Any:
    raise RuntimeError("broken on arrival")


class BreaksOnArrival(Exception):
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _break_on_arrival, ()


class FailingDel:
    """Fails when it goes."""

    def __del__(self) -> None:
        raise ValueError("the fault")


def at(place: str, cell: Cell, rank: int) -> None:
    """Be at a place: break there, if this is it."""
    if place != cell.when or rank != cell.rank:
        return
    strike()
    if cell.who == "caller" and cell.launcher != "torchrun":
        os.kill(int(os.environ["FAULT_CALLER"]), SIGNALS.get(cell.fault, signal.SIGUSR1))
        compute()
    elif cell.who == "caller":
        os.kill(os.getppid() if place != "in a loader worker" else _parent_of(os.getppid()), SIGNALS[cell.fault])
        compute()
    else:
        break_down(cell.fault)


def strike() -> None:
    """Note the moment of the fault, unless there was one: a loader's worker may come here again."""
    if not os.path.exists(STRUCK):
        with open(f"{STRUCK} {os.getpid()}", "w") as file:
            file.write(str(time.time()))
        os.replace(file.name, STRUCK)


def break_down(fault: str) -> None:
    """The fault itself."""
    if fault in ("raise", "raise while others compute"):
        raise ValueError("the fault")
    if fault == "sys.exit(3)":
        sys.exit(3)
    if fault == "os._exit(3)":
        os._exit(3)
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
        time.sleep(0.1)
    if fault == "infinite loop":
        while True:
            pass
    if fault == "unpicklable exception":
        raise Unpicklable("the fault")
    if fault == "exception while unpickling":
        raise BreaksOnArrival("the fault")
    if fault == "failing __del__":
        FailingDel()
    if fault == "full disk":
        print("what does not fit on the disk", flush=True)


def compute() -> None:
    """Compute outside of any collective, for longer than anybody should have to wait."""
    end = time.monotonic() + LINGER
    while time.monotonic() < end:
        pass


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


class Data(Dataset[torch.Tensor]):
    """Sixteen samples; the sixth of each share breaks the worker that makes it."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self._cell, self._rank = cell, rank

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None and index >= 12:
            at("in a loader worker", self._cell, self._rank)
        return torch.full((1,), float(index))


class Before:
    """An argument that breaks when it arrives at the rank, which has not joined the others then."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "RANK" in os.environ:
            at("before setup", self._cell, int(os.environ["RANK"]))


def body(cell: Cell, before: Before | None) -> str:
    """Train."""
    rank = dw.rank()
    others_compute = cell.fault == "raise while others compute" and rank != cell.rank and cell.who != "caller"
    if others_compute and cell.when == "before the first step":
        compute()
    at("before the first step", cell, rank)
    model = dw.wrap_model(nn.Linear(1, 1))
    workers = 1 if cell.when == "in a loader worker" else 0
    loader = dw.shard_loader(DataLoader(Data(cell, rank), batch_size=2, num_workers=workers))
    for step, batch in enumerate(loader):
        if others_compute and step == (3 if workers else 2):
            compute()
        if step == 2:
            at("in a step", cell, rank)
        model(batch).sum().backward()
    atexit.register(at, "in teardown", cell, rank)
    return "whole"


def main(cell: Cell) -> None:
    """Be the caller, and say what is seen."""
    if cell.who == "caller":
        os.environ["FAULT_CALLER"] = str(os.getpid())
        signal.signal(signal.SIGUSR1, lambda *_: break_down(cell.fault))
    if cell.when == "before setup" and cell.launcher in FORKS:
        _break_in_a_fork(cell)
    if cell.launcher in ("script", "torchrun"):
        at("before setup", cell, int(os.environ.get("RANK", "0")))
    launcher = "auto" if cell.launcher == "torchrun" else cell.launcher
    logs = "logs" if cell.fault == "full disk" else None
    if logs:
        os.makedirs(logs, exist_ok=True)
        if not os.path.lexists(full := f"{logs}/rank_{cell.rank}.stdout.log"):
            os.symlink("/dev/full", full)
    timeout = loop_limit() if cell.fault == "infinite loop" else 60.0
    run = dw.distributed(nprocs=2, launcher=launcher, timeout=timeout, log_dir=logs)(body)
    environ = dict(os.environ)
    seen: dict[str, Any] = {}
    try:
        seen["value"] = run(cell, Before(cell) if cell.launcher in ("forkserver", "spawn") else None)
    except BaseException as error:
        seen.update(raises=type(error).__name__, text=f"{error}\n{error.__cause__ or ''}")
        raise
    finally:
        seen["time"] = time.time()
        changed = set(os.environ.items()) ^ set(environ.items())
        # Where rank 0 is the caller, torch's compiler, which is imported with the first optimizer, leaves one there.
        seen["environ"] = sorted(item for item in changed if not item[0].startswith("TORCHINDUCTOR"))
        if cell.launcher != "torchrun" and dw.is_rank_zero():
            with open("seen", "w") as file:
                json.dump(seen, file)


def _break_in_a_fork(cell: Cell) -> None:
    forks = 0

    def count() -> None:
        nonlocal forks
        forks += 1

    os.register_at_fork(before=count, after_in_child=lambda: at("before setup", cell, forks - 1))


if __name__ == "__main__":
    main(Cell(*sys.argv[1:5]))
