"""Runs that join another and leave it again, and what is left of those that are killed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.engines.hivemind.program import left_behind, one_process

ROOT = Path(__file__).parents[3]
LIMIT = 150.0
GONE_SECONDS = 15.0  # torch's manager of shared memory takes a few of them


class Run:
    """A run in a process of its own, and what it has printed."""

    started: ClassVar[list[Run]] = []

    def __init__(self, token: str, folder: Path, nprocs: int, steps: int, **options: Any) -> None:
        self._log = folder / f"{uuid.uuid4().hex}.log"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PEERS_TOKEN": token, "TMPDIR": token}
        env.pop("DISTWRAP_QUIET", None)
        command = [sys.executable, "-m", "tests.engines.hivemind.run", str(nprocs), str(steps), json.dumps(options)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)
        self.started.append(self)

    def printed(self, pattern: str, seconds: float = LIMIT) -> re.Match[str]:
        """Wait until a line was printed, and return it."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self._log.read_text(), re.DOTALL)) is None:
            assert self.process.poll() is None, f"it ended without {pattern!r}:\n{self._log.read_text()}"
            assert time.monotonic() < deadline, f"no {pattern!r}:\n{self._log.read_text()}"
            time.sleep(0.1)
        return found

    def loss(self) -> float:
        """Wait for the end, and return the loss."""
        assert self.process.wait(LIMIT) == 0, self._log.read_text()
        return float(self.printed(r"LOSS (\S+)", 0.1)[1])

    def steps(self) -> int:
        """Return the number of global steps that it has printed."""
        return self._log.read_text().count("STEP ")

    def end(self) -> str:
        """Wait for an end with an error, and return what was printed."""
        assert self.process.wait(LIMIT) != 0
        return self._log.read_text()


@pytest.fixture
def token() -> Iterator[str]:
    """Return a folder for the temporary files of runs, of which no processes may be left."""
    token = tempfile.mkdtemp(prefix="hive-", dir="/tmp")  # short, as names of sockets are limited
    yield token
    for run in Run.started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait(LIMIT)
    Run.started.clear()
    deadline = time.monotonic() + GONE_SECONDS
    while (left := left_behind(token)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for each in left:
        if each[0].isdigit():
            os.kill(int(each.split()[0]), signal.SIGKILL)
    shutil.rmtree(token)
    assert not left


def test_runs_join_and_go(token: str, tmp_path: Path) -> None:
    """They take over what the first has learnt, by addresses that it prints; then one leaves, and one is killed."""
    first = Run(token, tmp_path, 2, 999, target_batch_size=12)
    peers = ast.literal_eval(first.printed(r"initial_peers=(\[[^]]*\])")[1])
    first.printed("STEP 2")
    leaves, killed = (Run(token, tmp_path, 1, steps, target_batch_size=12, initial_peers=peers) for steps in (2, 99))
    for each in (leaves, killed):
        words = r"took the weights, and the optimizer's state, of a peer after global step (\d+)"
        assert int(each.printed(words)[1]) >= 2
    first.printed("[34] peers average now, [12] of them of other runs")
    killed.printed("STEP")
    killed.process.kill()
    killed.process.wait(LIMIT)
    assert leaves.loss() < one_process(1)
    first.printed("2 peers average now, 0 of them .* 2 peers average now, 0 of them")
    (Path(token) / "stop").touch()
    loss = first.loss()
    (Path(token) / "stop").unlink()
    assert loss == pytest.approx(one_process(first.steps()), rel=0.05)


def test_nobody_trains_what_a_run_would_join(token: str, tmp_path: Path) -> None:
    """Neither peers that cannot be reached, nor those of another run_id or another target, make it train alone."""
    first = Run(token, tmp_path, 1, 99999)
    peers = ast.literal_eval(first.printed(r"initial_peers=(\[[^]]*\])")[1])
    first.printed("STEP 1")
    joining = {"target_batch_size": 6, "initial_peers": peers, "peer_seconds": 2.0}
    others = [
        Run(token, tmp_path, 1, 1, **{**joining, "run_id": "other"}),
        Run(token, tmp_path, 1, 1, **{**joining, "target_batch_size": 60}),
        Run(token, tmp_path, 1, 1, **{**joining, "initial_peers": [re.sub(r"/tcp/\d+/", "/tcp/1/", peers[0])]}),
    ]
    words = [
        "found none that trains run_id='other'",
        "with target_batch_size=6 and",
        "did not start with initial_peers=",
    ]
    for other, expected in zip(others, words, strict=True):
        assert expected in other.end()


def test_nothing_is_left_of_a_caller_that_is_killed(token: str, tmp_path: Path) -> None:
    """Its ranks end with it, and hivemind's processes with them; the next run removes the folder of their sockets."""
    run = Run(token, tmp_path, 2, 99)
    run.printed("STEP 1")
    assert [each for each in left_behind(token) if "p2pd" in each]
    run.process.kill()
    run.process.wait(LIMIT)
    deadline = time.monotonic() + GONE_SECONDS
    while left_behind(token) and time.monotonic() < deadline:
        time.sleep(0.2)
    sockets = {each for each in Path("/tmp").glob("distwrap-peer-*") if any(each.iterdir())}
    assert sockets
    Run(token, tmp_path, 1, 1).loss()
    assert not [each for each in sockets if each.exists()]
