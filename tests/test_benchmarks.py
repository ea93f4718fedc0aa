"""The benchmarks run; what they measure is for a quiet machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.interpreters import run_python

NIGHTLY = pytest.mark.nightly(row="benchmarks", why="test_codecs, by the same tools")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run_quick(name: str, folder: Path, seconds: float) -> tuple[str, set[str]]:
    """Return what a quick run prints, and what its figures are called."""
    figures = folder / "figures.json"
    done = run_python("-W", "error", BENCHMARKS / name, "--quick", "--json", figures, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout, {row["what"] for row in json.loads(figures.read_text())["rows"] if row["ours"]["seconds"]}


@NIGHTLY
def test_step(tmp_path: Path) -> None:
    """The step benchmark runs on two ranks and prints a line for each thing it times."""
    table, rows = run_quick("step.py", tmp_path, seconds=200)
    assert len(rows) + 3 * table.count(": not installed") == 12
    assert all(row in table for row in rows)


@NIGHTLY
def test_mistakes(tmp_path: Path) -> None:
    """Without a mistake distwrap trains as one process does, and each mistake is an error with its cure, or proven."""
    figures = tmp_path / "figures.json"
    done = run_python("-W", "error", BENCHMARKS / "mistakes.py", "--tools", "distwrap", "--json", figures, timeout=280)
    assert done.returncode == 0, done.stderr
    assert {row["mistake"]: row["seen"] for row in json.loads(figures.read_text())} == {
        "none": "right", "model": "error with the cure", "loader": "error with the cure",
        "shuffled": "silent, named by prove", "batches": "error with the cure",
        "break": "error with the cure", "sum": "silent, named by prove",
    }  # fmt: skip


@NIGHTLY
def test_checkpoint(tmp_path: Path) -> None:
    """The checkpoint benchmark runs, and prints what a save keeps waiting in each way."""
    table, rows = run_quick("checkpoint.py", tmp_path, seconds=200)
    assert len(rows) == 3
    assert all(row in table for row in rows)


@NIGHTLY
def test_sharded(tmp_path: Path) -> None:
    """The benchmark of divided models runs on two ranks: each holds half of the model, and a full save is measured."""
    table, rows = run_quick("sharded.py", tmp_path, seconds=200)
    assert len(rows) == 1
    assert all(row in table for row in rows)
    for way in ("distwrap fsdp", "torch fsdp2"):
        assert re.search(rf"^  {way} +weights, gradients, state +1 \(1\.00\); steady ", table, re.MULTILINE)
    assert re.search(r"^  distwrap fsdp .*; a full checkpoint \d+ more$", table, re.MULTILINE)
    assert "a quick run leaves out: distwrap ddp beside torch ddp, " in table


@NIGHTLY
@pytest.mark.timeout(450)
def test_engines(tmp_path: Path) -> None:
    """The benchmark of engines runs those that are here beside their own scripts, and says why the others are not."""
    table, rows = run_quick("engines.py", tmp_path, seconds=400)
    assert "a quick run leaves out: distwrap ddp, distwrap zero1, distwrap deepspeed 1, distwrap deepspeed 3" in table
    left_out = re.findall(r"^(.+): left out, for (?:there is no .+: make nightly|.+ has no )", table, re.MULTILINE)
    ways = ["distwrap fsdp", "distwrap deepspeed 2", "distwrap horovod"]
    here = [way for way in ways if way not in left_out]
    assert "distwrap fsdp" in here
    assert len(rows) == 2 * len(here)
    for way in here:
        assert {row.split(":")[0] for row in rows if f": {way}, " in row} == {"step", "start"}
        assert re.search(rf"^  {way} +steady +\d+, peak +\d+$", table, re.MULTILINE)


@pytest.mark.slow("runs a benchmark")
def test_codecs(tmp_path: Path) -> None:
    """The codecs' benchmark runs, and prints each one's way there and back."""
    table, rows = run_quick("codecs.py", tmp_path, seconds=200)
    assert len(rows) == 8
    assert all(row in table for row in rows)


@NIGHTLY
def test_slow_link(tmp_path: Path) -> None:
    """The benchmark of slow links runs on shaped links, where the machine has them, and says so where not."""
    done = run_python(BENCHMARKS / "slow_link.py", "--quick", "--only", "bytegrad", "local SGD, 16", timeout=200)
    assert done.returncode == 0, done.stderr
    if "slow_link needs" in done.stdout:
        pytest.skip(done.stdout.strip())
    lines = [line.split("Mbit/s")[1] for line in done.stdout.splitlines() if "Mbit/s" in line]
    assert [line.split()[0] for line in lines] == ["ddp", "bytegrad", "local"]


@NIGHTLY
def test_report(tmp_path: Path) -> None:
    """The benchmark of the report runs, and prints a line for each thing it compares."""
    table, rows = run_quick("report.py", tmp_path, seconds=200)
    assert len(rows) == 6
    assert all(row in table for row in rows)


@NIGHTLY
def test_slow_loops(tmp_path: Path) -> None:
    """The benchmark of slow loops runs, and prints what was found in each, and how often that was right."""
    table, rows = run_quick("slow_loops.py", tmp_path, seconds=200)
    assert len(rows) + table.count("shaped link: ") == 5
    for loop in ("slow_loader_on_one", "checkpoints", "busy_neighbour", "a healthy loop: pieces of advice"):
        assert loop in rows
        assert re.search(rf"^{loop} .*\([01] of 1 right\)", table, re.MULTILINE)
    assert "a quick run leaves out: slow_forward_on_one, " in table


@NIGHTLY
def test_clusters(tmp_path: Path) -> None:
    """The cluster benchmark runs; hand-written torch may fail to start again, and is then quoted."""
    table, rows = run_quick("clusters.py", tmp_path, seconds=170)
    assert all(row in table for row in rows)
    assert len(rows) + table.count("which failed: ") == 4


@NIGHTLY
def test_data(tmp_path: Path) -> None:
    """The data benchmark runs on two ranks, and prints a line for each size, each way but one and the middle."""
    table, rows = run_quick("data.py", tmp_path, seconds=200)
    assert all(row in table for row in rows)
    assert len(rows) + table.count(": not installed") == 2 * 2 + 4 + 1
    assert "a quick run leaves out: Fabric" in table


@NIGHTLY
def test_launch(tmp_path: Path) -> None:
    """The launch benchmark starts every way to launch but some peers', and prints a line for each."""
    table, rows = run_quick("launch.py", tmp_path, seconds=200)
    assert all(row in table for row in rows)
    assert len(rows) + table.count(": not installed") == 5
    assert "a quick run leaves out: Fabric ddp_fork, Fabric ddp_spawn, torchrunx" in table


@NIGHTLY
def test_against_another_checkout(tmp_path: Path) -> None:
    """A benchmark runs on two checkouts in turns, here this one twice, and prints the ratio of every row."""
    figures = tmp_path / "figures.json"
    words = ["--quick", "--against", BENCHMARKS.parent, "--json", figures]
    done = run_python(BENCHMARKS / "codecs.py", *words, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert len(rows) == 8
    assert all(" times" in row["figure"] and row["figure"] in done.stdout for row in rows)


@NIGHTLY
def test_imports(tmp_path: Path) -> None:
    """The benchmark of imports runs, and prints what distwrap takes beside torch."""
    table, rows = run_quick("imports.py", tmp_path, seconds=170)
    assert len(rows) == 2
    assert all(row in table for row in rows)


@NIGHTLY
def test_control_plane(tmp_path: Path) -> None:
    """The benchmark of the side channel runs with 64 ranks, all of which answer."""
    table, rows = run_quick("control_plane.py", tmp_path, seconds=170)
    assert len(rows) == 3
    assert all(row in table for row in rows)
    assert "64 ranks: 64 of them had answered" in table
