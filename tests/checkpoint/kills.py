"""Kill two ranks that save a divided model in parts all the time, at random moments, and look at what they left.

    python -m tests.checkpoint.kills --times 300

Prints how often it killed, how often that met parts half-written, and the number of the newest checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distwrap as dw
from tests.ports import free_port

RANKS = 2
WIDTH = 256
LONGEST = 1.2  # seconds from the first save to the kill


def state_of(model: nn.Module, step: int) -> dict[str, Any]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return {"step": step, "model": model, "twice": torch.full((WIDTH, WIDTH), 2 * step)}


def save_forever(folder: Path, first: int, told: mmap.mmap) -> None:
    """Save a series and one name in turn, now and in the background; tell the number of what is on disk."""
    torch.set_num_threads(1)
    dw.setup_process_group("gloo")
    model = dw.wrap_model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), strategy="fsdp")
    for step in range(first, first + 10_000):
        background = step % 3 == 0
        state = state_of(model, step)
        dw.save(state, folder / f"step-{step}", keep=2, io="sharded", background=background)
        dw.save(state, folder / "last", io="sharded", background=background)
        if dw.rank() == 0:
            told[:8] = (step - background).to_bytes(8, "little")


def is_whole(state: dict[str, Any]) -> bool:
    step = state["step"]
    tensors = state["model"].values()
    return len(tensors) == 6 and all((value == step).all() for value in tensors) and (state["twice"] == 2 * step).all()


def newest_in(folder: Path) -> int:
    """Load everything that has a name, and the link to the latest and the one name; return the newest number."""
    steps = []
    for path in folder.iterdir():
        if path.name.startswith("step-") and not path.is_symlink():
            state = dw.load(path)
            assert is_whole(state), path
            steps.append(state["step"])
    for name in ("last", "step-latest"):
        state = dw.resume_from(folder / name)
        assert state is None or is_whole(state), name
        steps.append(state["step"] if state is not None and name == "last" else 0)
    return max(steps)


def killed_once(folder: Path, first: int, told: mmap.mmap) -> bool:
    """Start the ranks, kill one and then the other; return whether that met parts half-written."""
    port, children = free_port(), []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 2)  # the survivor's errors
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
                os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE=str(RANKS))
                save_forever(folder, first, told)
            finally:
                os._exit(1)
        children.append(child)
    end = time.monotonic() + 60
    while not any(folder.glob(f".step-{first}.*.tmp")) and not (folder / f"step-{first}").exists():
        assert time.monotonic() < end, "the ranks did not begin to save"
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, LONGEST))
    random.shuffle(children)
    for child in children:
        os.kill(child, signal.SIGKILL)
        time.sleep(random.choice((0.0, 0.01)))
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-signal.SIGKILL, 1)
    halves = [*folder.glob(".*.tmp")]
    for half in halves:
        shutil.rmtree(half)
    return bool(halves)


def main(times: int, folder: Path) -> None:
    random.seed(0)
    torch.set_num_threads(1)
    for name in ("torch.distributed.fsdp", "distwrap.checkpoint.sharded"):
        importlib.import_module(name)  # once, and not in each child
    torch.compiler.reset()  # which imports what FSDP does
    told = mmap.mmap(-1, 8)
    kills, in_midst, newest = 0, 0, 0
    while kills < times or (not in_midst and kills < 4 * times):  # few kills may all have come between two saves
        kills += 1
        in_midst += killed_once(folder, newest + 1, told)
        found = newest_in(folder)
        assert found >= max(newest, int.from_bytes(told[:8], "little")), (found, newest, told[:8])
        newest = found
    print(kills, in_midst, newest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=300)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="distwrap-kills-"))
    try:
        main(given.times, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
