"""What `python -m distwrap convert` makes of programs with Accelerate, beside the programs under the real package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

CONVERT = Path(__file__).parents[2] / "convert"
CASES = [path for path in sorted(CONVERT.glob("cases/accelerate/*.py")) if path.name.count(".") == 1]
PROGRAM = CONVERT / "peers" / "accelerate_text.py"


@pytest.mark.parametrize("path", [*CASES, PROGRAM], ids=lambda path: path.stem)
def test_the_converted_script_is_the_program(path: Path, tmp_path: Path) -> None:
    """In one process, the program under Accelerate and the converted script end with the same weights."""
    first, second = (trained(each, tmp_path / each.stem) for each in (path, path.with_suffix(".after.py")))
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=1e-6)


def trained(script: Path, folder: Path) -> Any:
    """Run a script in a folder of its own, and return the weights that it has saved."""
    folder.mkdir()
    words = ["--cpu", "--gradient_accumulation_steps", "3"] if "peers" in script.parts else []
    env = {**os.environ, "PYTHONPATH": str(CONVERT.parents[1]), "ACCELERATE_USE_CPU": "true"}
    env |= {"DISTWRAP_NPROCS": "1", "BATCH": "8", "OUT": "out.pt"}
    done = subprocess.run(
        [sys.executable, str(script), *words], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / ("results/pytorch_model.bin" if words else "out.pt"), weights_only=True)
