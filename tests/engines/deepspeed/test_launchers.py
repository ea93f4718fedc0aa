"""Stage 3 under launchers that do not set LOCAL_RANK, which DeepSpeed reads in each step."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distwrap as dw
from tests.clusters.conftest import slurm as slurm  # the fixture
from tests.clusters.slurm import Slurm
from tests.engines.deepspeed.test_deepspeed import assert_close, one_process

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "tests.engines.deepspeed.program"]
LAUNCHERS = {
    "open_mpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
    "mpich": ["mpirun.mpich", "-np", "2"],
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the command of a rank, which writes into a folder of this test's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return [*PROGRAM, str(tmp_path / "saved.pt")]


def assert_trained(program: list[str], source: str) -> None:
    """Compare what was saved with one process."""
    saved = dw.load(program[-1])
    assert saved["source"] == source
    assert_close(saved["model"], one_process())


@pytest.mark.parametrize("source", LAUNCHERS)
def test_under_mpi(source: str, program: list[str]) -> None:
    """Open MPI and MPICH."""
    command = LAUNCHERS[source]
    if shutil.which(command[0]) is None:
        pytest.skip(f"not installed: {command[0]}")
    done = subprocess.run([*command, *program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_trained(program, source)


def test_under_slurm(slurm: Slurm, program: list[str]) -> None:
    """srun, on one node."""
    done = slurm.run("srun", "-N1", "-n2", *program, seconds=120, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert_trained(program, "slurm")
