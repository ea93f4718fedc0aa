"""Signals to real process groups, and callers that are killed: no rank is left, whatever started it."""

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

from distwrap.network.waiting import wait_until
from tests.clusters.running import JOB, ended, started, wait_for_line
from tests.launch import scripted
from tests.launch.signalled import Run, said
from tests.limits import SOON
from tests.orphans import lives

pytestmark = pytest.mark.slow("starts interpreters, each of which imports torch")


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Runs that are ended after the test."""
    started: list[Run] = []
    yield started
    for run in started:
        run.close()


@pytest.mark.parametrize("launcher", ["fork", "forkserver"])
def test_ctrl_c(launcher: str, tmp_path: Path, runs: list[Run]) -> None:
    """A Ctrl-C reaches the ranks in order, their own clean-up runs, and the caller ends with KeyboardInterrupt."""
    runs.append(run := Run(tmp_path, launcher, "", sys.executable))
    run.send(signal.SIGINT)
    code, output, errors = run.ended()
    assert code == -signal.SIGINT
    assert sorted(re.findall(r"interrupted (\d)", output)) == ["0", "1"]
    assert said(errors) == ["KeyboardInterrupt: the ranks have ended"]


@pytest.mark.parametrize("launcher", ["fork", "forkserver"])
def test_ctrl_c_with_loader_workers(launcher: str, tmp_path: Path, runs: list[Run]) -> None:
    """Where loader workers are at work, a Ctrl-C is one line too."""
    runs.append(run := Run(tmp_path, launcher, "with workers", sys.executable))
    time.sleep(1)
    run.send(signal.SIGINT)
    code, _, errors = run.ended()
    assert code == -signal.SIGINT
    assert said(errors) == ["KeyboardInterrupt: the ranks have ended"]


def test_a_signal_that_ends_the_ranks(tmp_path: Path, runs: list[Run]) -> None:
    """A caller that is asked to stop ends by that signal, as it would have without ranks, after all of them."""
    runs.append(run := Run(tmp_path, "forkserver", "", sys.executable))
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == -signal.SIGTERM


def test_ctrl_c_in_a_script(tmp_path: Path) -> None:
    """A Ctrl-C ends the run within seconds, and rank 0, which is the caller, cleans up."""
    with scripted.Run(tmp_path, "one in a collective", python=sys.executable) as run:
        time.sleep(0.5)
        os.killpg(run.process.pid, signal.SIGINT)
        code, output, errors = run.ended()
    assert code == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "clean-up of rank 0" in output


def test_the_caller_of_a_script_is_killed(tmp_path: Path) -> None:
    """When a signal ends rank 0, the others end with it."""
    with scripted.Run(tmp_path, "zero in a collective", python=sys.executable) as run:
        run.process.send_signal(signal.SIGKILL)
        assert run.ended()[0] == -signal.SIGKILL


def test_ctrl_c_under_elastic() -> None:
    """A Ctrl-C to the caller leaves no rank."""
    env = {"DISTWRAP_NPROCS": "2", "DISTWRAP_MAX_RESTARTS": "1", "JOB_SLOW": "0.3"}
    with started([*JOB, "60"], **env) as process:
        wait_for_line(process, '"epoch": 1')
        os.kill(process.pid, signal.SIGINT)
        left = ended(process, SOON)
    assert left.code == -signal.SIGINT, left.output


WAITS = """
import os, sys, time
import distwrap as dw

@dw.distributed(nprocs=2, launcher=sys.argv[1])
def main():
    print("rank", os.getpid(), flush=True)
    time.sleep(100)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
def test_no_rank_outlives_a_killed_caller(launcher: str, tmp_path: Path) -> None:
    """When the caller is killed outright, the kernel ends the ranks, also where they are forks of a server."""
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "waits.py", launcher]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.kill()
    if not wait_until(lambda: not any(map(lives, pids)), SOON):
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)
        raise AssertionError("ranks live on")
