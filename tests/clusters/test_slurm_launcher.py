"""launcher="slurm" under a real Slurm: a call submits a job of itself, and gets what it returns, or why it failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import slurm_program
from tests.clusters.running import Ended, environment, started, wait_for_line
from tests.clusters.slurm import Slurm

pytestmark = pytest.mark.slow("runs jobs under a Slurm of its own")
in_nightly = pytest.mark.nightly(row="slurm", why="test_a_call_comes_home_with_the_weights_of_one_process")

COMMAND = [sys.executable, slurm_program.__file__]


@pytest.fixture
def folder(tmp_path: Path, slurm: Slurm) -> Iterator[Path]:
    """The folder where the script is called; nothing of ours and no job may be left."""
    yield tmp_path
    assert not list(tmp_path.iterdir())
    deadline = time.monotonic() + 20
    while left := slurm.run("squeue", "-h").stdout.strip():
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def submitted(slurm: Slurm, folder: Path, *words: str) -> Ended:
    """Call the script as a user does on a login node."""
    env = environment(SLURM_CONF=slurm.env["SLURM_CONF"])
    done = subprocess.run([*COMMAND, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return Ended.of(done.returncode, done.stdout + done.stderr)


def test_a_call_comes_home_with_the_weights_of_one_process(
    slurm: Slurm, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two nodes and four tasks; what they print is shown meanwhile, to the last word, and the job ends by itself."""
    logs = tmp_path_factory.mktemp("logs") / "new"
    done = submitted(slurm, folder, "train", str(logs))
    assert done.code == 0, done.output
    values = done.values()[0]
    assert [value[:3] for value in values] == [[0, 0, 2], [0, 1, 2], [1, 0, 2], [1, 1, 2]]
    for *_, weights in values:
        assert weights == pytest.approx(slurm_program.trained(), abs=1e-5)
    assert all(done.output.count(f"rank {rank} of 4 is there") == 1 for rank in range(4))
    assert all(f"last words of {rank}" in done.output for rank in range(4))
    assert "submitit" not in done.output
    number = done.output.partition("Slurm job ")[2].split()[0]
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", number).stdout
    assert "rank 3 of 4 is there" in (logs / "rank_3.stdout.log").read_text()


@in_nightly
def test_a_job_of_one_rank(slurm: Slurm, folder: Path) -> None:
    """It trains as one process, on its node."""
    done = submitted(slurm, folder, "one rank")
    assert done.code == 0, done.output
    [[_, _, nnodes, weights]] = done.values()[0]
    assert nnodes == 1
    assert weights == pytest.approx(slurm_program.trained(), abs=1e-5)


@in_nightly
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("raise", "OwnError", ["out of cheese", "rank 1 on "]),
        ("die", "WorkerDiedError", ["rank 1 of Slurm job", "died without raising an exception", "exit code 137"]),
        ("die while another computes", "WorkerDiedError", ["rank 1 of Slurm job"]),
        ("all die", "WorkerDiedError", ["died without raising an exception: the job is FAILED"]),
        ("no room", "ArrivalError", ["did not start within 4 s", "reason: BeginTime"]),
        ("refused", "LaunchError", ["Slurm has refused the job: ", "invalid partition specified: nowhere"]),
    ],
)
def test_a_failure_comes_home(slurm: Slurm, folder: Path, kind: str, error: str, words: list[str]) -> None:
    """In its own type, with the cause; the job is gone."""
    done = submitted(slurm, folder, kind)
    told = done.told[0]
    assert told["error"] == error, done.output
    assert all(each in told["text"] for each in words), done.output


@in_nightly
def test_ctrl_c_cancels_the_job(slurm: Slurm, folder: Path) -> None:
    """What the caller has started ends with it."""
    env = {"SLURM_CONF": slurm.env["SLURM_CONF"]}
    with started(["env", "-C", str(folder), *COMMAND, "hang"], **env) as process:
        wait_for_line(process, "rank 0 of 2 is there")
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.communicate(timeout=60)[0]


@in_nightly
def test_a_job_ends_whose_caller_was_killed(slurm: Slurm, tmp_path: Path) -> None:
    """The ranks see that the caller gives no sign, and end: the cluster is not left busy for nobody."""
    env = {"SLURM_CONF": slurm.env["SLURM_CONF"]}
    with started(["env", "-C", str(tmp_path), *COMMAND, "orphan"], **env) as process:
        wait_for_line(process, "rank 0 of 2 is there")
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while left := [*slurm.run("squeue", "-h").stdout.splitlines(), *tmp_path.iterdir()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
