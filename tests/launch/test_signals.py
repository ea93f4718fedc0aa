"""Signals that reach the caller while ranks run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limits import SOON
from tests.slow import INTERPRETERS, slow

LIMIT = 60.0

PROGRAM = """
import os, signal, sys, time
import torch
import distwrap as dw

@dw.distributed(nprocs=2, launcher=sys.argv[1], timeout=60)
def main(what):
    if what == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heard = []
    if what == "preempted":
        signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))
        signal.signal(signal.SIGUSR2, lambda *_: heard.append("USR2"))
    print("rank", os.getpid(), flush=True)
    try:
        if what == "in a collective" and dw.rank() == 0:
            dw.barrier()
        if what == "with workers":
            for batch in dw.shard_loader(torch.utils.data.DataLoader(torch.arange(10**6), 1, num_workers=2)):
                pass
        end = time.monotonic() + 100
        while time.monotonic() < end and not heard:
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("interrupted", dw.rank(), flush=True)
        raise
    dw.barrier()
    return heard

if __name__ == "__main__":
    if sys.argv[2] == "stubborn":
        from distwrap.launch import supervisor
        supervisor.INTERRUPT_SECONDS = 1000.0
    if sys.argv[2] == "own handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(77))
    print("result", main(sys.argv[2]), flush=True)
"""


class Run:
    """A program with two ranks, which have begun."""

    def __init__(self, folder: Path, launcher: str, what: str) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self._errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, program, launcher, what],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.pids = [int(self.process.stdout.readline().split()[1]) for _ in range(2)]
        time.sleep(0.3)

    def send(self, number: int) -> None:
        """Send a signal to the caller and, as a terminal does, to its group."""
        os.killpg(self.process.pid, number)

    def ended(self, within: float = SOON) -> tuple[int, str, str]:
        """Wait for the end; return exit code, output and errors, and see that no rank is left."""
        output, _ = self.process.communicate(timeout=within)
        self._errors.seek(0)
        left = [pid for pid in self.pids if _is_alive(pid)]
        assert not left, left
        return self.process.returncode, output, self._errors.read()

    def close(self) -> None:
        """End what is left."""
        self.process.kill()
        self.process.communicate()
        self._errors.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    """Runs that are ended after the test."""
    started: list[Run] = []
    yield started
    for run in started:
        run.close()


@pytest.mark.parametrize("launcher", ["fork", slow("forkserver", why=INTERPRETERS)])
def test_ctrl_c(launcher: str, tmp_path: Path, runs: list[Run]) -> None:
    """A Ctrl-C reaches the ranks in order, their own clean-up runs, and the caller ends with KeyboardInterrupt."""
    runs.append(run := Run(tmp_path, launcher, ""))
    run.send(signal.SIGINT)
    code, output, errors = run.ended()
    assert code == -signal.SIGINT
    assert sorted(re.findall(r"interrupted (\d)", output)) == ["0", "1"]
    assert said(errors) == ["KeyboardInterrupt: the ranks have ended"]


def said(errors: str) -> list[str]:
    """Return what is on standard error, without the lines that tell of the start."""
    return [line for line in errors.splitlines() if not line.startswith("distwrap: ")]


@pytest.mark.parametrize("launcher", ["fork", slow("forkserver", why=INTERPRETERS)])
@pytest.mark.slow("waits for a limit to pass")
def test_ctrl_c_with_loader_workers(launcher: str, tmp_path: Path, runs: list[Run]) -> None:
    """Where loader workers are at work, a Ctrl-C is one line too."""
    runs.append(run := Run(tmp_path, launcher, "with workers"))
    time.sleep(1)
    run.send(signal.SIGINT)
    code, _, errors = run.ended()
    assert code == -signal.SIGINT
    assert said(errors) == ["KeyboardInterrupt: the ranks have ended"]


@pytest.mark.slow(INTERPRETERS)
def test_ctrl_c_in_a_collective(tmp_path: Path, runs: list[Run]) -> None:
    """A rank that waits in a collective does not hear it, and is ended all the same."""
    runs.append(run := Run(tmp_path, "fork", "in a collective"))
    run.send(signal.SIGINT)
    assert run.ended()[0] == -signal.SIGINT


@pytest.mark.slow("waits for a limit to pass")
def test_a_second_ctrl_c(tmp_path: Path, runs: list[Run]) -> None:
    """Ranks that do not want to end are given some time, here very long, and none after the second Ctrl-C."""
    runs.append(run := Run(tmp_path, "fork", "stubborn"))
    run.send(signal.SIGINT)
    time.sleep(1)
    assert run.process.poll() is None
    run.send(signal.SIGINT)
    assert run.ended()[0] == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGUSR2, why=INTERPRETERS)])
@pytest.mark.slow("waits for a limit to pass")
def test_a_signal_that_ends_the_ranks(number: signal.Signals, tmp_path: Path, runs: list[Run]) -> None:
    """A caller that is asked to stop ends by that signal, as it would have without ranks, after all of them."""
    runs.append(run := Run(tmp_path, "forkserver", ""))
    run.process.send_signal(number)
    assert run.ended()[0] == -number


@pytest.mark.slow(INTERPRETERS)
@pytest.mark.parametrize(("number", "heard"), [(signal.SIGTERM, "TERM"), (signal.SIGUSR2, "USR2")])
def test_a_signal_that_the_ranks_handle(number: signal.Signals, heard: str, tmp_path: Path, runs: list[Run]) -> None:
    """Ranks that take a signal as a wish, as `lockstep` does, hear it through the caller, which goes on."""
    runs.append(run := Run(tmp_path, "fork", "preempted"))
    run.process.send_signal(number)
    code, output, _ = run.ended()
    assert code == 0
    assert f"result ['{heard}']" in output


@pytest.mark.slow(INTERPRETERS)
def test_a_handler_of_the_users(tmp_path: Path, runs: list[Run]) -> None:
    """A handler that the user has installed in the caller decides how it ends."""
    runs.append(run := Run(tmp_path, "forkserver", "own handler"))
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == 77


def test_where_are_they(tmp_path: Path, runs: list[Run]) -> None:
    """SIGQUIT to the caller prints where each rank is, and the run goes on."""
    runs.append(run := Run(tmp_path, "fork", "in a collective"))
    run.process.send_signal(signal.SIGQUIT)
    errors = tmp_path / "errors"
    deadline = time.monotonic() + SOON
    while "rank 1" not in errors.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert re.search(
        r"distwrap: where the ranks are:\n  rank 0 in barrier at program\.py:\d+\n  rank 1 in main at program\.py:\d+",
        errors.read_text(),
    )
    assert run.process.poll() is None
