"""Ranks of a benchmark, each a process that takes a step when it is asked to, and what is told of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from ports import free_port
from samples import Samples
from table import Row

MEGABYTE = 2**20
LIMIT = 300.0  # seconds for an answer
Memory = dict[str, int]  # what of, and how many bytes


def _checkout() -> str:
    """Return the folder from which distwrap is imported here, so that another interpreter imports the same."""
    found = find_spec("distwrap")
    return "" if found is None or found.origin is None else str(Path(found.origin).parent.parent)


_CHECKOUT = _checkout()


class Ranks:
    """Processes of one way to train, which wait to be asked for steps.

    Args:
        way: a name in the script's table of ways.
        ranks: how many.
        size: of the model: ``"full"`` or ``"quick"``.
        script: the file beside this one that each of them runs.
        python: the interpreter; by default this one.
    """

    def __init__(
        self, way: str, ranks: int, size: str, *, script: str = "sharded_ranks.py", python: str = sys.executable
    ) -> None:
        self._way, self._conns, self._began = way, [], time.perf_counter()
        self._processes: list[subprocess.Popen[bytes]] = []
        port, engine_port = free_port(), free_port()
        for rank in range(ranks):
            ours, theirs = Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "DISTWRAP_QUIET": 1}
            paths = os.pathsep.join(filter(None, (_CHECKOUT, os.environ.get("PYTHONPATH"))))
            variables = {**place, **meeting, "ENGINE_PORT": engine_port, "PYTHONPATH": paths}
            env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            command = [python, str(Path(__file__).with_name(script)), way, size]
            self._processes.append(
                subprocess.Popen([*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=env)
            )
            theirs.close()
            self._conns.append(ours)

    def wait(self) -> float:
        """Wait until all have taken their first step, and return the seconds since their launch."""
        self._answers()
        return time.perf_counter() - self._began

    def ask(self, what: str) -> list[Any]:
        """Return the answer of each rank."""
        for conn in self._conns:
            conn.send(what)
        return self._answers()

    def step(self) -> float:
        """Return the seconds of the slowest rank."""
        return float(max(self.ask("step")))

    def close(self) -> None:
        for conn in self._conns:
            with suppress(BrokenPipeError):
                conn.send("end")
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self) -> list[Any]:
        return [self._answer(rank) for rank in range(len(self._conns))]

    def _answer(self, rank: int) -> Any:
        try:
            if self._conns[rank].poll(LIMIT):
                return self._conns[rank].recv()
            problem = f"has not answered in {LIMIT:g} s"
        except EOFError:
            problem = f"has ended with {self._processes[rank].wait(10)}"
        for process in self._processes:
            process.kill()
        raise RuntimeError(f"{self._way}: rank {rank} {problem}; what it printed is above")


def ratio_row(what: str, ours: Samples, theirs: Samples, unit: str, goal: float | None) -> Row:
    """Return a row of the ratio of two ways, and whether it is within the goal."""
    ratio = ours.over(theirs)
    met = None if goal is None else ratio <= goal
    return Row(what, ours, theirs, unit, f"{ratio:.3f} times", "" if goal is None else f"<= {goal}", met)


def most(memory: list[Memory]) -> dict[str, float]:
    """Return the most that one of the ranks takes, in megabytes, by what of."""
    return {name: max(rank[name] for rank in memory) / MEGABYTE for name in memory[0]}
