"""What a run shows of itself to another process: `top` and `where`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distwrap.cli import main
from distwrap.cli.top import table
from distwrap.network.waiting import wait_until
from distwrap.supervision.live import Run, runs

ROOT = Path(__file__).parents[2]

SCRIPT = """
import time
import torch
import distwrap as dw
from torch import nn

def train():
    model = dw.wrap_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(100_000, 4, 4, generator=dw.rank_generator(0))
    bar = dw.progress(batches)
    for x in bar:
        if dw.is_rank_zero():
            bar.set_postfix(loss=0.5)
        if dw.rank() == 1:
            time.sleep(0.02)  # the slow one
        model(x).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    dw.distributed(nprocs=2, timeout=60, launcher="fork")(train)()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of two ranks in another process, of which both have shown themselves."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, tmp_path / "train.py"], env=environment, stderr=subprocess.DEVNULL)

    def found() -> Run | None:
        here = [each for each in runs() if each.has(process.pid) and len(each.figures) == 2]
        return here[0] if here and all((shown["step"] or 0) > 5 for shown in here[0].figures) else None

    try:
        yield wait_until(found, 60, longest_pause=0.2)  # type: ignore[misc]
    finally:
        process.terminate()
        process.wait(20)


def test_where_the_ranks_are(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """By the caller's process, by a rank's, or all runs; the table has a line for each rank."""
    first, second = sorted(run.figures, key=lambda shown: shown["rank"])
    assert first["pid"] != second["pid"]
    for pid in (run.holder, second["pid"]):
        assert main(["where", str(pid)]) == 0
        said = capsys.readouterr().out
        assert f"run of process {run.holder}:" in said
        assert " at train.py:" in said
    assert main(["top", str(run.holder), "--once"]) == 0
    _, columns, *ranks = capsys.readouterr().out.splitlines()
    assert "loss=0.5" in ranks[0]
    assert columns.split()[:5] == ["rank", "pid", "host", "device", "step"]
    assert [line.split()[:2] for line in ranks] == [["0", str(first["pid"])], ["1", str(second["pid"])]]


def test_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "1", "--once"]) == 1
    assert "process 1 is no rank, and has none, on this node" in capsys.readouterr().err
    assert main(["where", "1"]) == 1


def test_the_table() -> None:
    figures = {"pid": 7, "host": "a", "device": "cuda:0", "memory": 10**9, "device_memory": 2 * 10**9, "time": 90.0}
    shown = [
        {**figures, "rank": 1, "step": 12, "speed": 3.14, "idle": 0.25, "where": "in backward at a.py:3", "shown": ""},
        {**figures, "rank": 0, "step": None, "speed": 0.0, "idle": 1.0, "where": "at a.py:4", "shown": "loss=0.5"},
    ]
    head, _, first, second = table(Run(5, shown), now=100.0).splitlines()
    assert head == "run of process 5"
    assert " ".join(first.split()) == "0 7 a cuda:0 - 0.0 100 % 2.0 GB + 1.0 GB loss=0.5 at a.py:4, 10 s ago"
    assert second.endswith("  in backward at a.py:3, 10 s ago")
