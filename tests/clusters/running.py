"""Run the job under whatever launcher, and read what its ranks have told."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clusters import job

PYTHON = sys.executable
JOB = [PYTHON, job.__file__]
ROOT = str(Path(__file__).parents[2])
_EPOCHS = 60  # as many as any test trains

# What could reach a program from the tests' own surroundings.
_DROPPED = ("DISTWRAP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")


def environment(**more: str) -> dict[str, str]:
    """A clean environment that finds the package, with one thread a rank unless said otherwise."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return {**env, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1", **more}


@dataclass
class Ended:
    """How a program ended."""

    code: int
    output: str
    told: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, code: int, output: str) -> Ended:
        """Take out what its ranks have told."""
        lines = [line.partition("TOLD ")[2] for line in output.splitlines() if "TOLD " in line]
        return cls(code, output, [json.loads(line) for line in lines])

    def starts(self) -> list[dict[str, Any]]:
        """What each rank told at its start, by rank."""
        return sorted((line for line in self.told if "start" in line), key=lambda line: int(line["start"]))

    def values(self) -> list[Any]:
        """What the calls returned."""
        return [line["value"] for line in self.told if "value" in line]


@contextlib.contextmanager
def started(command: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and end what is left of its group."""
    process = subprocess.Popen(
        command,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def ended(process: subprocess.Popen[str], seconds: float = 100) -> Ended:
    """Wait for a program's end."""
    output = process.communicate(timeout=seconds)[0]
    return Ended.of(process.returncode, output)


def run(command: list[str], seconds: float = 100, **env: str) -> Ended:
    """Run a program to its end."""
    with started(command, **env) as process:
        return ended(process, seconds)


def wait_for_line(process: subprocess.Popen[str], text: str) -> Ended:
    """Read a program's output up to a line, and return it so far; the test's own time limit ends it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return Ended.of(0, "".join(lines))
    raise AssertionError(f"it ended without {text}: {''.join(lines)}")


@functools.cache
def _weights_of_one_process() -> list[list[float]]:
    """Return the weights after each number of epochs, in a single process."""
    alone = run([*JOB, str(_EPOCHS)], JOB_TELLS_WEIGHTS="1")
    assert alone.code == 0, alone.output
    weights = [line["weights"] for line in alone.told if "weights" in line]
    assert weights[-1] == alone.values()[0]
    return weights


def is_like_one_process(value: list[float], epochs: int = 3) -> bool:
    """Return whether weights are those of a single process, but for the order in which floats were added."""
    expected = _weights_of_one_process()[epochs - 1]
    return len(value) == len(expected) and all(abs(a - b) < 1e-5 for a, b in zip(value, expected, strict=True))


def assert_like_one_process(value: list[float], epochs: int = 3) -> None:
    """Compare weights with those of a single process."""
    assert is_like_one_process(value, epochs), (value, _weights_of_one_process()[epochs - 1])
