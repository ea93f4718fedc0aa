"""Scripts as people write them print the same numbers on simulated ranks as under torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.forked_commands import forked_commands
from tests.interpreters import run_python
from tests.slow import nightly, slow

SCRIPTS = Path(__file__).with_name("scripts")
NAMES = sorted(script.stem for script in SCRIPTS.glob("*.py"))
# What torchrun's two ranks have printed.
RECORDED = {
    "ddp_globals": ["RESULT losses 1.35421610 0.69090077", "RESULT weights 16.92489939"],
    "dw_fsdp": ["RESULT loss 0.87852532 norm 2.68016437 rank 0 rank 1", "RESULT outputs 50 17.93651977"],
}


def results(*words: Any, folder: Path, **variables: str) -> list[str]:
    """Return in order the lines that a program has printed about what it has computed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = run_python(*words, cwd=folder, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("RESULT"))


def simulated(name: str, ranks: int, folder: Path) -> list[str]:
    return results("-m", "distwrap", "simulate", "-n", ranks, SCRIPTS / f"{name}.py", folder=folder)


def under_torchrun(name: str, ranks: int, folder: Path) -> list[str]:
    """A script that names GPUs is told that there are none."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", SCRIPTS / f"{name}.py"]
    return results(*words, folder=folder, PLAIN="1", **forked_commands(plain=True))


def assert_alike(found: list[str], expected: list[str]) -> None:
    """Assert that words are equal, and numbers nearly so: torch adds in another order."""
    assert expected
    assert [list(map(_number, line.split())) for line in found] == [
        [pytest.approx(each, rel=1e-6, abs=1e-6) if isinstance(each, float) else each for each in map(_number, words)]
        for words in map(str.split, expected)
    ]


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


@pytest.mark.parametrize("name", RECORDED)
def test_a_script_computes_what_torchrun_did(name: str, tmp_path: Path) -> None:
    """By what is written down of it, so that only simulated ranks run."""
    assert_alike(simulated(name, 2, tmp_path), RECORDED[name])


@pytest.mark.timeout(300)  # a guard: two programs, one of which has ranks of its own
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "ranks",
    [
        slow(2, why="torchrun and its ranks, for each script"),
        *(nightly(ranks, row="products", why="two ranks show it of the same scripts") for ranks in (1, 4)),
    ],
)
def test_a_script_computes_what_torchrun_does(name: str, ranks: int, tmp_path: Path) -> None:
    """Also one that names GPUs, of which the simulation shows as many as ranks."""
    assert_alike(simulated(name, ranks, tmp_path), under_torchrun(name, ranks, tmp_path))
