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
from dataclasses import dataclass
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


@dataclass
class Found:
    """What a kill has left: the newest number, how many files the series has, and how many the pointer is behind."""

    newest: int = 0
    held: int = 0
    behind: int = 0


def check(folder: Path, before: Found) -> Found:
    """Load everything that has a name; each kill may leave one file more, and the pointer one file further behind."""
    found = Found()
    for path in folder.iterdir():
        if not path.name.startswith("."):
            state = dw.load(path)
            assert is_whole(state), path
            found.newest = max(found.newest, state["step"])
    if (folder / "step-latest.pt").exists():
        latest = dw.load(folder / "step-latest.pt")["step"]
        numbered = [int(path.stem.split("-")[1]) for path in folder.glob("step-[0-9]*.pt")]
        found.held, found.behind = len(numbered), sum(number > latest for number in numbered)
        assert found.behind <= before.behind + 1, (latest, numbered, before)
        assert found.held <= max(before.held, 3) + 1, (numbered, before)
    if (folder / ".parts.previous").exists():
        assert is_whole(dw.load(folder / "parts"))
    return found


def main(folder: Path, times: int) -> None:
    random.seed(0)
    torch.set_num_threads(1)
    found = check(folder, Found())
    dw.save(state_of(0), folder / "parts", io="sharded")  # what it imports, is imported once
    kills, in_midst, newest = 0, 0, 0
    while kills < times or (newest <= times // 15 and kills < 4 * times):  # on busy cores few saves are ever done
        kills += 1
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
        found = check(folder, found)
        newest = max(newest, found.newest)
        for half in halves:
            if half.is_file():
                half.unlink()
    print(kills, in_midst, newest)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
