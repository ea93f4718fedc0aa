"""The lowest wrapt that setup.cfg declares works: its classes have no types to subscript, for example."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreters import run_python

ROOT = Path(__file__).parents[2]
PROGRAM = """
import copy
import wrapt
from distwrap import distributed, rank_zero_only, world_size

@distributed(nprocs=1)
def double(x: int) -> int:
    return 2 * x

class Trainer:
    @distributed(nprocs=2, launcher="fork")
    def fit(self, x: int) -> int:
        return x * world_size()

    @distributed
    @staticmethod
    def same(x: int) -> int:
        return x

    @rank_zero_only
    def report(self) -> str:
        return "rank 0"

if __name__ == "__main__":
    trainer = Trainer()
    print(wrapt.__version__, double(1), copy.deepcopy(double)(2), double.options(nprocs=1)(3))
    print(trainer.fit(3), trainer.fit.options(nprocs=1)(3), Trainer.same(4), trainer.report())
"""


def lowest(package: str) -> str:
    """Return the lowest version of a package that setup.cfg declares."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    found = re.search(rf"^{package}>=([\d.]+)$", config["options"]["install_requires"], re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.nightly(row="packaging", why="other tests of this folder, with the wrapt that is installed")
def test_the_lowest_wrapt(tmp_path: Path) -> None:
    """Plain functions, methods, static methods, copies and rank-zero functions work with it."""
    version = f"{lowest('wrapt')}.0"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "wrapt")]
    done = subprocess.run([*install, f"wrapt=={version}"], capture_output=True, text=True, timeout=200, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install wrapt {version} here: {done.stderr.strip()[-200:]}")
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path / "wrapt"), str(ROOT)])
    done = run_python(tmp_path / "program.py", env={**os.environ, "PYTHONPATH": path}, timeout=90)
    assert done.stdout.splitlines() == [f"{version} 2 4 6", "6 3 4 rank 0"], done.stderr
