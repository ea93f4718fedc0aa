"""Ranks that nobody but their variables starts, as a cluster's do; each is a fork of one interpreter that has torch.

The interpreter runs this file. A fork runs a program as `python program.py …` does, to the interpreter's own end, and
need not import torch: that takes a rank seconds.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

ByHand = Callable[..., list[tuple[int, str]]]  # given the program, its words, and numbers of ranks


class Starter:
    """The interpreter; one for all tests of a module."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, program: Path, *words: str, port: int, nprocs: int, started: int, seconds: float
    ) -> list[tuple[int, str]]:
        """Run a program on ranks, and return each one's exit code and output.

        Args:
            program: a script.
            *words: its command line.
            port: free one, where the ranks meet.
            nprocs: number of ranks.
            started: how many of them are started.
            seconds: after which the test fails.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        outputs = [program.with_name(f"output of rank {rank}") for rank in range(started)]
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nprocs)}
        asked = {"command": [str(program), *words], "env": env, "outputs": list(map(str, outputs))}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        assert ready, f"{words}: {[output.read_text() for output in outputs if output.exists()]}"
        codes = json.loads(self._process.stdout.readline())
        return [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]

    def close(self) -> None:
        """End the interpreter, and its forks, which are of its session."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _start_ranks(asked: dict[str, Any]) -> list[int]:
    """Return each rank's exit code, negative of a signal; a rank leaves by an exception, and ends the interpreter."""
    pids = []
    for rank, output in enumerate(asked["outputs"]):
        pid = os.fork()
        if pid == 0:
            for number, path in enumerate((os.devnull, output, output)):
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
                os.dup2(os.open(path, flags), number)
            os.environ.clear()  # for those that the test has set, or has not
            os.environ.update({**asked["env"], "RANK": str(rank), "LOCAL_RANK": str(rank)})
            sys.argv = asked["command"]
            program = sys.argv[0]
            sys.path[0] = os.path.dirname(program)
            runpy.run_path(program, run_name="__main__")
            sys.exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    from distwrap.launch.server import prepare

    prepare()
    for line in sys.stdin:
        print(json.dumps(_start_ranks(json.loads(line))), flush=True)
