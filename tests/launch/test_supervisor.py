"""A rank that fails stops the others, and the caller learns of the first cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import distwrap as dw
from distwrap import distributed
from distwrap.errors import CollectiveError, WorkerDiedError, WorkerError, WorkerTimeoutError
from distwrap.launch.outcome import (
    CAUSE_SECONDS,
    SETTLE_SECONDS,
    Outcome,
    collect,
    death,
    first_cause,
    raise_if_failed,
    success,
)
from distwrap.supervision.failure import Failure
from distwrap.testing import run_ranks
from tests.clock import FastClock
from tests.limits import SOON
from tests.orphans import lives
from tests.slow import slow

LAUNCHERS = ["fork", "forkserver", slow("spawn", why="the other two")]


def told(rank: int, moment: float, error: BaseException, *, secondary: bool = False) -> Outcome:
    return Outcome(rank, failure=Failure.of(error, rank, host="host", time=moment, secondary=secondary))


def test_the_earliest_failure_is_the_cause() -> None:
    """Of two failures the earlier one is named, whichever was read first."""
    late, early = told(0, 2.0, ValueError("late")), told(1, 1.0, ValueError("early"))
    assert first_cause([late, early]) is early.failure
    assert first_cause([success(0, None)]) is None


def test_an_echo_is_never_the_cause() -> None:
    """A rank that only lost its peer does not hide the peer's own failure, or its silent death."""
    echo = told(0, 1.0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), secondary=True)
    end, error = death(1, 2, -9), told(1, 2.0, KeyError("x"))
    assert first_cause([echo, end]) is end.failure
    assert first_cause([echo, error]) is error.failure
    assert first_cause([echo]) is echo.failure


def test_an_echo_that_names_the_cause_gives_way_to_it_alone() -> None:
    """A rank that names the one it has lost gives way to that one's own end; ranks that had left lost nothing by it."""
    words = "rank 0 on host lost the connection to a rank that failed first: rank 1"
    echo, end = told(0, 1.0, WorkerError(words), secondary=True), death(1, 2, -9)
    assert first_cause([echo, end]) is end.failure
    with pytest.raises(WorkerError, match="a rank that failed first: rank 1"):
        raise_if_failed([echo, success(2, None)])


@pytest.mark.parametrize(("secondary", "seconds"), [(False, SETTLE_SECONDS), (True, CAUSE_SECONDS)])
def test_others_have_a_moment_to_explain_a_failure(secondary: bool, seconds: float) -> None:
    """After a failure outcomes are waited for a moment, and longer where it only follows from another one."""
    clock, first = FastClock(), told(0, 1.0, ValueError("no"), secondary=secondary)
    asked: list[float | None] = []

    def receive(left: float | None, cause: Failure | None) -> list[Outcome]:
        asked.append(left)
        clock.sleep(0.1)
        return [first] if cause is None else []

    assert collect(receive, clock=clock) == [first]
    assert asked == [None, pytest.approx(seconds)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_others_in_a_collective_are_stopped(launcher: str) -> None:
    """While the others wait in a collective for it, a rank that raises ends the run at once."""

    @distributed(nprocs=3, launcher=launcher)
    def fails() -> None:
        if dw.rank() == 1:
            raise ValueError("the first cause")
        dw.barrier()

    start = time.monotonic()
    with pytest.raises(ValueError, match="the first cause"):
        fails()
    assert time.monotonic() - start < SOON


def test_others_at_work_are_stopped() -> None:
    """While the others compute outside any collective, a rank that raises ends the run at once."""

    @distributed(nprocs=2, launcher="forkserver")
    def fails() -> None:
        if dw.rank() == 0:
            raise ValueError("the first cause")
        while True:
            pass

    start = time.monotonic()
    with pytest.raises(ValueError, match="the first cause"):
        fails()
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("fork", signal.SIGKILL), ("forkserver", signal.SIGSEGV), slow("spawn", signal.SIGKILL, why="the other two")],
)
def test_a_killed_rank_is_named(launcher: str, number: int) -> None:
    """A rank that a signal ended is named, with the signal, though its peers complain first."""

    @distributed(nprocs=2, launcher=launcher)
    def dies() -> None:
        if dw.rank() == 1:
            os.kill(os.getpid(), number)
        dw.barrier()
        dw.barrier()

    with pytest.raises(
        WorkerDiedError, match=rf"rank 1 on .* died without raising an exception: killed by {number.name}"
    ) as caught:
        dies()
    assert (caught.value.rank, caught.value.signal, caught.value.exitcode) == (1, number, -number)


def test_an_early_exit_is_named() -> None:
    """A rank that leaves through os._exit is named, with its exit code."""

    @distributed(nprocs=2, launcher="forkserver")
    def leaves() -> None:
        if dw.rank() == 0:
            os._exit(7)
        dw.barrier()

    with pytest.raises(WorkerDiedError, match=r"rank 0 .*exit code 7"):
        leaves()


@pytest.mark.parametrize("launcher", ["fork", "forkserver"])
def test_grandchildren_are_stopped_too(launcher: str, tmp_path: Path) -> None:
    """What a failing run's ranks have started themselves is ended with them."""
    note = tmp_path / "pid"

    @distributed(nprocs=2, launcher=launcher)
    def fails() -> None:
        if dw.rank() == 0:
            child = subprocess.Popen(["sleep", "100"])
            note.write_text(str(child.pid))
        dw.barrier()
        if dw.rank() == 1:
            raise ValueError("now")
        time.sleep(100)

    with pytest.raises(ValueError, match="now"):
        fails()
    pid = int(note.read_text())
    for _ in range(100):
        if not lives(pid):
            break
        time.sleep(0.05)
    assert not lives(pid)


def test_run_ranks_ends_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    """A test body that hangs on one rank fails in time, with the Python stack of the rank."""

    def hangs() -> None:
        if dw.rank() == 1:
            time.sleep(100)

    start = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=r"rank 1 of 2 on .* within 1 s"):
        run_ranks(hangs, 2, timeout=1)
    assert time.monotonic() - start < SOON
    assert "in hangs" in capfd.readouterr().err


@pytest.mark.parametrize("launcher", ["fork", "forkserver"])
def test_waiting_for_a_rank_that_is_done_is_explained(launcher: str) -> None:
    """A collective that only some ranks call ends when the others are done, and says so."""

    @distributed(nprocs=2, launcher=launcher)
    def alone() -> None:
        if dw.is_rank_zero():
            dw.barrier()

    start = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 0 on .* waited in a collective for rank 1, which had left"):
        alone()
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("launcher", ["fork", slow("forkserver", why="[fork]")])
def test_a_clean_exit_on_one_rank_is_no_end_for_the_others(launcher: str) -> None:
    """A rank that calls sys.exit(0) has left as by a return: others go on; one that waits for it, or all: an error."""

    @distributed(nprocs=2, launcher=launcher)
    def leaves(who: list[int], *, wait: bool = False) -> str:
        if dw.rank() in who:
            sys.exit(0)
        time.sleep(0.5)
        if wait:
            dw.barrier()
        return "done"

    assert leaves([1]) == "done"
    with pytest.raises(CollectiveError, match=r"waited in a collective for rank 1, which had left .* sys\.exit"):
        leaves([1], wait=True)
    with pytest.raises(SystemExit) as caught:
        leaves([0, 1])
    assert caught.value.code == 0
    with pytest.raises(SystemExit):
        leaves([0])
    with pytest.raises(WorkerError, match=r"rank 1 left .*leaves\(\) by sys\.exit\(0\), so there is no value"):
        leaves.options(returns="all")([1])


def test_a_group_that_the_function_destroys() -> None:
    """A function that takes the process group down itself, as hand-written code does, ends well, every time."""

    @distributed(nprocs=2, launcher="forkserver")
    def destroys() -> int:
        model = dw.wrap_model(torch.nn.Linear(3, 1))
        model(torch.ones(2, 3)).sum().backward()
        torch.distributed.destroy_process_group()
        return 1

    assert [destroys() for _ in range(5)] == [1] * 5
