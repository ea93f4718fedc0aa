"""Signals that reach the caller while ranks run."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.signalled import Run, said
from tests.limits import SOON
from tests.slow import slow


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    """Runs that are ended after the test."""
    started: list[Run] = []
    yield started
    for run in started:
        run.close()


def test_ctrl_c(tmp_path: Path, runs: list[Run]) -> None:
    """A Ctrl-C reaches the ranks in order, their own clean-up runs, and the caller ends with KeyboardInterrupt."""
    runs.append(run := Run(tmp_path, "fork", ""))
    run.send(signal.SIGINT)
    code, output, errors = run.ended()
    assert code == -signal.SIGINT
    assert sorted(re.findall(r"interrupted (\d)", output)) == ["0", "1"]
    assert said(errors) == ["KeyboardInterrupt: the ranks have ended"]


@pytest.mark.slow("test_ctrl_c and test_a_second_ctrl_c show most of it")
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


@pytest.mark.slow("a program")
def test_a_signal_that_ends_the_ranks(tmp_path: Path, runs: list[Run]) -> None:
    """A caller that is asked to stop ends by that signal, as it would have without ranks, after all of them."""
    runs.append(run := Run(tmp_path, "forkserver", ""))
    run.process.send_signal(signal.SIGUSR2)
    assert run.ended()[0] == -signal.SIGUSR2


@pytest.mark.parametrize(
    ("number", "heard"), [(signal.SIGTERM, "TERM"), slow(signal.SIGUSR2, "USR2", why="the same with another number")]
)
def test_a_signal_that_the_ranks_handle(number: signal.Signals, heard: str, tmp_path: Path, runs: list[Run]) -> None:
    """Ranks that take a signal as a wish, as `lockstep` does, hear it through the caller, which goes on."""
    runs.append(run := Run(tmp_path, "fork", "preempted"))
    run.process.send_signal(number)
    code, output, _ = run.ended()
    assert code == 0
    assert f"result ['{heard}']" in output


@pytest.mark.slow("a program")
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
