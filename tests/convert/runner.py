"""Run a script on ranks that the tests' warm interpreter forks: each as a program of its own, as torchrun starts it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.interpreters import LEAVE_LATE, ROOT, interpreter
from tests.ports import free_port


def torchrun_variables(ranks: int) -> list[dict[str, str]]:
    """Return the variables by which torchrun tells each rank its place."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "case"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run(
    script: Path,
    ranks: Sequence[Mapping[str, str]],
    limit: float = 60,
    *,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
) -> str:
    """Run a script on some ranks, and return what the first has printed, after a look at the exit code of each.

    Args:
        script: to be run.
        ranks: the environment of each.
        limit: in seconds, after which the ranks are killed.
        arguments: of the script's command line.
        folder: in which it runs; by default the script's own.
    """
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DISTWRAP_QUIET": "1", LEAVE_LATE: "1"}
    command = [sys.executable, str(script), *arguments]
    with contextlib.ExitStack() as files:
        nothing = files.enter_context(open(os.devnull))
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in ranks]
        forks = [
            interpreter().start(command, str(folder or script.parent), {**shared, **own}, [nothing, output, output])
            for own, output in zip(ranks, outputs, strict=True)
        ]
        codes = [fork.wait(limit) for fork in forks]
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    assert not any(codes) and None not in codes, "\n".join([f"exit codes {codes}", *texts])  # noqa: PT018
    return texts[0]
