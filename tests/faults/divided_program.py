"""A user's program that trains a divided model, and breaks where it is told to."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy
from distwrap.strategies.pipeline import PipelineStrategy
from tests.faults.cells import loop_limit
from tests.faults.divided_cells import AT, PLACES, DividedCell
from tests.faults.program import compute, strike
from tests.plans import TP, TWO_BY_TWO

STRATEGIES: dict[str, tuple[Any, int]] = {
    "fsdp": ("fsdp", 2),
    "hsdp": (FSDPStrategy(shard=2), 4),
    "zero1": ("zero1", 2),
    "tp": (TP, 2),
    "fsdp+tp": (TWO_BY_TWO, 4),
    "pipeline": ("pipeline", 2),
    "two pipelines": (PipelineStrategy(stages=2), 4),
}
STEPS = 8
LONGEST = 0.4  # seconds from the second of many saves to the kill


class Now:
    """Where this rank is."""

    cell: DividedCell
    step = -1


def is_odd(*faults: str) -> bool:
    """Say whether this rank is about to do what the others do not; note the moment."""
    cell = Now.cell
    odd = (not faults or cell.fault in faults) and Now.step >= AT and dw.rank() == cell.rank
    if odd:
        strike()
    return odd and (Now.step == AT or cell.fault == "other batch")


def differs(fault: str) -> bool:
    """Say whether this rank is one of the others, which do something then."""
    cell = Now.cell
    return cell.fault == fault and Now.step == AT and dw.rank() != cell.rank


def at(place: str) -> None:
    """Be at a place: break there, if this is it."""
    fault = Now.cell.fault
    if PLACES.get(fault) != place or not is_odd():
        return
    if fault.startswith("raise") or fault == "catch and go on":
        raise ValueError("the fault")
    if fault == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory: the fault")
    if fault.startswith("SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.startswith("sys.exit"):
        sys.exit(3)
    if fault == "Ctrl-C":
        os.kill(int(os.environ["FAULT_CALLER"]), signal.SIGINT)
        compute()
    while fault == "infinite loop":
        pass


class Block(nn.Module):
    """A block that every strategy can divide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at("in a block")
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        if x.requires_grad:
            x.register_hook(lambda _: at("in a backward"))
        return x


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at("in a forward")
        x = self.first(x)
        blocks = list(self.blocks)
        if is_odd("skip a unit") or differs("evaluate while others skip a unit"):
            del blocks[1 + dw.rank() % 2]
        for block in blocks[:: -1 if is_odd("other order") else 1]:
            x = block(x)
        return self.last(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) - x.sum(1, keepdim=True)).square().mean()


def body(cell: DividedCell) -> str:
    """Train."""
    Now.cell, Now.step = cell, -1
    model: Any = dw.wrap_model(Net(), same_inputs=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for Now.step in range(STEPS):
        if is_odd("skip a batch"):
            continue
        if is_odd("return early"):
            return "early"
        x = _batch(Now.step + 100 * is_odd("other batch"))
        if is_odd("evaluate alone", "evaluate while others skip a unit"):
            with torch.no_grad():
                model.loss(x)
        if is_odd("save alone"):
            dw.save(state, "last.pt")
        if is_odd("save parts alone"):
            dw.save(state, "last", io="sharded")
        if Now.step == AT and PLACES.get(cell.fault) in ("in a save", "in a load"):
            _go_on_until_killed(state)
        try:
            loss = model.loss(x)
        except ValueError:
            if cell.fault != "catch and go on":
                raise
            continue
        loss.backward()
        at("before a step")
        dw.optimizer_step(optimizer, max_norm=1.0 if is_odd("clip alone") else None)
        if is_odd("step alone"):
            dw.optimizer_step(optimizer)
    return "whole"


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def _go_on_until_killed(state: dict[str, Any]) -> None:
    """Save, or load, again and again, until this or another rank is killed in the midst of it."""
    fault, end = Now.cell.fault, time.monotonic() + 60
    path, io = _checkpoint(fault)
    for number in itertools.count(1):
        if number == 1 or "save" in fault:
            numbered = {**state, "number": torch.full((3,), number)}
            dw.save(numbered, path, io=io, background=number % 3 == 0)
            if dw.rank() == 0 and number % 3:
                Path("saved").write_text(str(number))
        else:
            dw.load(path, into=state, io=io)
        if number == 2 and dw.rank() == Now.cell.rank:
            threading.Thread(target=_kill_soon, daemon=True).start()
        assert time.monotonic() < end, "nobody was killed"


def _kill_soon() -> None:
    time.sleep(random.SystemRandom().uniform(0, LONGEST))
    strike()
    os.kill(os.getpid(), signal.SIGKILL)


def _checkpoint(fault: str) -> tuple[Path, str]:
    return (Path("last"), "sharded") if "parts" in fault else (Path("last.pt"), "file")


def main(cell: DividedCell) -> None:
    """Be the caller, and say what is seen."""
    os.environ["FAULT_CALLER"] = str(os.getpid())
    strategy, ranks = STRATEGIES[cell.strategy]
    timeout = loop_limit() if cell.waits else 60.0
    run = dw.distributed(nprocs=ranks, launcher=cell.launcher, strategy=strategy, timeout=timeout)(body)
    environ, seen = dict(os.environ), dict[str, Any]()
    try:
        seen["value"] = run(cell)
    except BaseException as error:
        seen.update(raises=type(error).__name__, text=f"{error}\n{error.__cause__ or ''}")
        raise
    finally:
        seen["time"] = time.time()
        seen["environ"] = sorted(set(os.environ.items()) ^ set(environ.items()))
        seen["wrong"] = _lost(cell.fault) if PLACES.get(cell.fault) in ("in a save", "in a load") else ""
        with open("seen", "w") as file:
            json.dump(seen, file)


def _lost(fault: str) -> str:
    """Say what is lost of what was saved before a kill."""
    saved = Path("saved")
    number = int(saved.read_text() or 0) if saved.exists() else 0
    path, io = _checkpoint(fault)
    try:
        state = dw.load(path, io=io)
        whole = Net()
        whole.load_state_dict(state["model"])
        found = int(state["number"].min())
    except Exception as error:  # noqa: BLE001 - whatever it is, the checkpoint is lost
        return f"the checkpoint does not load: {type(error).__name__}: {error}"
    return "" if found >= number else f"the checkpoint is number {found}, and {number} was on the disk"
