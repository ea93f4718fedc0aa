"""Whatever is installed, nothing of another engine is imported unless it is chosen: so imports cost what they did."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.interpreters import run_python
from tests.slow import nightly

ENGINES = ("deepspeed", "horovod", "hivemind", "ray", "submitit", "transformers", "accelerate", "torch_xla")

PROGRAM = f"""
import json, sys
import torch
from torch import nn
import distwrap as dw

def main():
    model = dw.wrap_model(nn.Linear(2, 2))
    optimizer = dw.wrap_optimizer(torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    dw.optimizer_step(optimizer)
    return sorted(set({ENGINES!r}) & sys.modules.keys())

if __name__ == "__main__":
    launcher = sys.argv[1]
    print(json.dumps(dw.distributed(nprocs=2, launcher=launcher, returns="all")(main)()))
    print(json.dumps(sorted(set({ENGINES!r}) & sys.modules.keys())))
"""


@pytest.mark.parametrize("launcher", ["fork", nightly("spawn", row="products", why="fork")])
@pytest.mark.slow("a program of its own")
def test_no_engine_is_imported_unless_it_is_chosen(launcher: str, tmp_path: Path) -> None:
    """Neither by the caller nor by the ranks of a run of DDP."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_python(program, launcher, env={"PYTHONPATH": str(Path(__file__).parents[2])}, timeout=100)
    lines = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.9 prints such
    assert [json.loads(line) for line in lines] == [[[], []], []], done.stderr


def test_there_is_something_to_leave_alone() -> None:
    """In each environment of an engine, and of `make test-all`, at least one of them is installed."""
    assert any(find_spec(name) for name in ENGINES)
