"""Ranks that nobody but their variables starts, as a cluster's do."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from tests.interpreters import interpreter
from tests.limits import SOON
from tests.ports import free_port


def by_hand(program: Path, *words: str, nprocs: int = 2, started: int | None = None) -> list[tuple[int | None, str]]:
    """Run a program on ranks, and return each one's exit code, ``None`` where it had to be ended, and output.

    Args:
        program: a script.
        *words: its command line.
        nprocs: number of ranks.
        started: how many of them are started; by default all.
    """
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(nprocs)}
    command = [sys.executable, str(program), *words]
    with contextlib.ExitStack() as opened, open(os.devnull, "rb") as nothing:
        outputs = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(started or nprocs)]
        forks = []
        for rank, output in enumerate(outputs):
            env.update(RANK=str(rank), LOCAL_RANK=str(rank))
            forks.append(interpreter().start(command, os.getcwd(), env, [nothing, output, output]))
        ended = []
        for fork, output in zip(forks, outputs, strict=True):
            code = fork.wait(SOON)
            output.seek(0)
            ended.append((code, output.read().decode()))
    return ended
