"""Many launches, many ranks, and two runs at once."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import distwrap as dw
from distwrap import distributed
from distwrap.testing import run_ranks
from tests.limits import SOON
from tests.slow import nightly

LAUNCHES = int(os.environ.get("FAULTS_LAUNCHES", "50"))  # 1,000 in `make faults`
FAULT = 25  # launches from one to the next
MEGABYTES = 10.0


def _resident() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 1e6


def _held() -> tuple[int, int, int]:
    threads = Path("/proc/self/task").iterdir()
    children = sum(len((thread / "children").read_text().split()) for thread in threads)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), children


@pytest.mark.slow("60 launches each")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["forkserver", nightly("fork", row="faults", why="[forkserver]")])
def test_launches_in_a_row(launcher: str) -> None:
    """Launch after launch, a failure now and then, nothing is left: process, thread, file or memory."""

    @distributed(nprocs=2, launcher=launcher)
    def once(number: int) -> int:
        if number % FAULT == FAULT - 1 and dw.rank() == 1:
            raise ValueError("the fault")
        return number

    for number in range(10):
        once(number)
    gc.collect()
    held, resident = _held(), _resident()
    for number in range(LAUNCHES):
        if number % FAULT == FAULT - 1:
            with pytest.raises(ValueError, match="the fault"):
                once(number)
        else:
            assert once(number) == number
    gc.collect()
    assert _held() == held
    assert _resident() - resident < MEGABYTES


def _token(mine: str) -> list[str]:
    time.sleep(0.02)
    return dw.gather_object(f"{mine} {dw.rank()}")


@pytest.mark.nightly(row="faults", why="launch/test_server.py::test_two_runs_at_once")
def test_two_runs_at_once() -> None:
    """Two runs side by side on one machine never meet."""

    def runs(mine: str) -> set[tuple[str, ...]]:
        return {tuple(run_ranks(_token, 3, mine, timeout=60)[0]) for _ in range(10)}

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(runs, ["a", "b"]))
    assert seen == [{tuple(f"{mine} {rank}" for rank in range(3))} for mine in ("a", "b")]


@pytest.mark.slow("many ranks, twice")
@pytest.mark.parametrize("nprocs", [12, nightly(64, row="faults", why="[12]")])
def test_many_ranks(nprocs: int) -> None:
    """Many ranks start, exchange, and stop; and with a fault in one of them they stop too."""

    @distributed(nprocs=nprocs, launcher="forkserver", timeout=2 * SOON)
    def many(fault: bool) -> int:
        if fault and dw.rank() == nprocs - 1:
            raise ValueError("the fault")
        return int(dw.reduce(1, "sum"))

    assert many(False) == nprocs
    start = time.monotonic()
    with pytest.raises(ValueError, match="fault"):
        many(True)
    assert time.monotonic() - start < SOON
