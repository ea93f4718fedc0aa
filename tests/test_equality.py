"""However the ranks are started, training gives the weights of one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import distwrap as dw
from tests import training
from tests.interpreters import run_python
from tests.slow import MORE_RANKS, slow
from tests.training import Weights

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def expected() -> Weights:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return training.reference()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("nprocs", [2, slow(4, why=MORE_RANKS)])
@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
def test_processes_of_ours(launcher: str, nprocs: int, expected: Weights) -> None:
    """Ranks that are processes of ours end with the weights of one process."""
    weights = training.main.options(launcher=launcher, nprocs=nprocs)()
    training.assert_equal_to_reference(weights, expected)


@pytest.mark.parametrize("nprocs", [2, slow(4, why=MORE_RANKS)])
def test_script(nprocs: int, expected: Weights, tmp_path: Path) -> None:
    """Ranks that run the script again end with the weights of one process."""
    run("-m", "tests.training", tmp_path / "weights.pt", DISTWRAP_LAUNCHER="script", DISTWRAP_NPROCS=str(nprocs))
    training.assert_equal_to_reference(dw.load(tmp_path / "weights.pt"), expected)


@pytest.mark.parametrize("nprocs", [2, slow(4, why=MORE_RANKS)])
def test_torchrun(nprocs: int, expected: Weights, tmp_path: Path) -> None:
    """Ranks that torchrun started join instead of launching, and end with the weights of one process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}"]
    run(*torchrun, "-m", "tests.training", tmp_path / "weights.pt")
    training.assert_equal_to_reference(dw.load(tmp_path / "weights.pt"), expected)


def test_retrofit(expected: Weights) -> None:
    """A loop that knows nothing of distribution trains the caller's own model to the weights of one process."""
    fit = dw.distributed(nprocs=2, retrofit=True, seed=11)(training.fit)
    for dtype in (torch.float64, torch.float32):
        model = training.network(dtype)
        loader = torch.utils.data.DataLoader(training.data(dtype), batch_size=training.GLOBAL_BATCH // 2, shuffle=True)
        fit(model, loader)
        for name, value in expected[str(dtype)].items():
            tolerance = 1e-9 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=tolerance)


def run(*words: str | Path, **env: str) -> str:
    done = run_python(*words, cwd=ROOT, env={**os.environ, **env}, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
