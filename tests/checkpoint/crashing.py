"""Fork a process that saves all the time, kill it at a random moment, look at what it left; many times.

    python -m tests.checkpoint.crashing FOLDER KILLS

Prints how often it killed, how often that met a file half-written, and the number of the newest checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import distwrap as dw

# As many numbers as take some milliseconds to write.
SIZE = 200_000


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "a": torch.full((SIZE,), step), "b": {"c": torch.full((SIZE // 2,), float(step))}}


def is_whole(state: dict[str, Any]) -> bool:
    step = state["step"]
    return bool((state["a"] == step).all() and (state["b"]["c"] == step).all())


def save_forever(folder: Path, first: int) -> None:
    """Save in every way in turn; each is of one number."""
    torch.set_num_threads(1)
    for step in range(first, first + 10_000):
        state = state_of(step)
        dw.save(state, folder / f"step-{step}.pt", keep=3, background=step % 2 == 0)
        dw.save(state, folder / "last.pt", keep=2, background=step % 3 == 0)
        if step % 4 == 0:
            dw.save(state, folder / "parts", io="sharded")


def check(folder: Path) -> int:
    """Load everything that has a name; return the newest number."""
    newest = 0
    for path in folder.iterdir():
        if not path.name.startswith("."):
            state = dw.load(path)
            assert is_whole(state), path
            newest = max(newest, state["step"])
    if (folder / "step-latest.pt").exists():
        latest = dw.load(folder / "step-latest.pt")["step"]
        numbered = [int(path.stem.split("-")[1]) for path in folder.glob("step-[0-9]*.pt")]
        assert latest in (max(numbered), max(numbered) - 1), (latest, numbered)
        assert len(numbered) <= 4
    if (folder / ".parts.previous").exists():
        assert is_whole(dw.load(folder / "parts"))
    return newest


def main(folder: Path, kills: int) -> None:
    random.seed(0)
    torch.set_num_threads(1)
    check(folder)
    dw.save(state_of(0), folder / "parts", io="sharded")  # what it imports, is imported once
    in_midst, newest = 0, 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                save_forever(folder, newest + 1)
            finally:
                os._exit(1)
        time.sleep(random.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        halves = [*folder.glob(".*.tmp")]
        in_midst += bool(halves)
        newest = max(newest, check(folder))
        for half in halves:
            if half.is_file():
                half.unlink()
    print(kills, in_midst, newest)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
