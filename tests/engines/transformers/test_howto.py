"""The program of the how-to about Hugging Face runs: docs/howto/programs/transformers_model.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "docs" / "howto" / "programs" / "transformers_model.py"


@pytest.mark.slow("imports transformers in a program of its own")
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    """Two ranks train a model of transformers, which transformers then loads."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
