"""The benchmarks run; what they measure is for a quiet machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("runs a benchmark")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run_quick(name: str, folder: Path, seconds: float) -> tuple[str, set[str]]:
    """Return what a quick run prints, and what its figures are called."""
    figures = folder / "figures.json"
    command = [sys.executable, "-W", "error", str(BENCHMARKS / name), "--quick", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout, {row["what"] for row in json.loads(figures.read_text())["rows"] if row["ours"]["seconds"]}


def test_step(tmp_path: Path) -> None:
    """The step benchmark runs on two ranks and prints a line for each thing it times."""
    table, rows = run_quick("step.py", tmp_path, seconds=60)
    assert len(rows) + 3 * table.count(": not installed") == 12
    assert all(row in table for row in rows)


def test_checkpoint(tmp_path: Path) -> None:
    """The checkpoint benchmark runs, and prints what a save keeps waiting in each way."""
    table, rows = run_quick("checkpoint.py", tmp_path, seconds=60)
    assert len(rows) == 3
    assert all(row in table for row in rows)


def test_sharded(tmp_path: Path) -> None:
    """The benchmark of divided models runs on two ranks: fsdp holds half of what ddp does, and a full save little."""
    table, rows = run_quick("sharded.py", tmp_path, seconds=110)
    assert len(rows) == 5
    assert all(row in table for row in rows)
    held = {way: re.search(rf"distwrap {way} .*\((\d\.\d\d)\)", table) for way in ("ddp", "zero1", "zero2", "fsdp")}
    assert {way: found and found[1] for way, found in held.items()} == {
        "ddp": "2.00",
        "zero1": "1.50",
        "zero2": "1.25",
        "fsdp": "1.00",
    }


@pytest.mark.timeout(420)  # a guard: with DeepSpeed and Horovod it takes two minutes
def test_engines(tmp_path: Path) -> None:
    """The benchmark of engines runs those that are here beside their own scripts, and says why the others are not."""
    table, rows = run_quick("engines.py", tmp_path, seconds=400)
    ways = ["distwrap ddp", "distwrap fsdp", "distwrap zero1", *(f"distwrap deepspeed {n}" for n in (1, 2, 3))]
    left_out = re.findall(r"^(.+): left out, for (?:there is no .+: make test-engines|.+ has no )", table, re.MULTILINE)
    here = [way for way in [*ways, "distwrap horovod"] if way not in left_out]
    assert {"distwrap ddp", "distwrap fsdp", "distwrap zero1"} <= set(here)
    assert len(rows) == 2 * len(here)
    for way in here:
        assert {row.split(":")[0] for row in rows if f": {way}, " in row} == {"step", "start"}
        assert re.search(rf"^  {way} +steady +\d+, peak +\d+$", table, re.MULTILINE)


def test_codecs(tmp_path: Path) -> None:
    """The codecs' benchmark runs, and prints each one's way there and back."""
    table, rows = run_quick("codecs.py", tmp_path, seconds=60)
    assert len(rows) == 8
    assert all(row in table for row in rows)


def test_slow_link(tmp_path: Path) -> None:
    """The benchmark of slow links runs on shaped links, where the machine has them, and says so where not."""
    command = [sys.executable, str(BENCHMARKS / "slow_link.py"), "--quick", "--only", "bytegrad", "local SGD, 16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    if "slow_link needs" in done.stdout:
        pytest.skip(done.stdout.strip())
    lines = [line.split("Mbit/s")[1] for line in done.stdout.splitlines() if "Mbit/s" in line]
    assert [line.split()[0] for line in lines] == ["ddp", "bytegrad", "local"]


@pytest.mark.timeout(300)
def test_report(tmp_path: Path) -> None:
    """The benchmark of the report runs, and prints a line for each thing it compares."""
    table, rows = run_quick("report.py", tmp_path, seconds=250)
    assert len(rows) == 8
    assert all(row in table for row in rows)


@pytest.mark.timeout(300)
def test_slow_loops(tmp_path: Path) -> None:
    """The benchmark of slow loops runs, and prints what was found in each."""
    table, rows = run_quick("slow_loops.py", tmp_path, seconds=250)
    assert len(rows) + table.count("shaped link: ") == 10
    assert "rank [1]: data (1 of 1 right)" in table


def test_clusters(tmp_path: Path) -> None:
    """The cluster benchmark runs; hand-written torch may fail to start again, and is then quoted."""
    table, rows = run_quick("clusters.py", tmp_path, seconds=170)
    assert all(row in table for row in rows)
    assert len(rows) + table.count("which failed: ") == 4


def test_data(tmp_path: Path) -> None:
    """The data benchmark runs on two ranks, and prints a line for each size, each way and the middle."""
    table, rows = run_quick("data.py", tmp_path, seconds=110)
    assert all(row in table for row in rows)
    assert len(rows) + table.count(": not installed") == 2 * 2 + 5 + 1


def test_launch(tmp_path: Path) -> None:
    """The launch benchmark starts every way to launch that is installed, and prints a line for each."""
    table, rows = run_quick("launch.py", tmp_path, seconds=110)
    assert all(row in table for row in rows)
    assert len(rows) + table.count(": not installed") == 8


def test_against_another_checkout(tmp_path: Path) -> None:
    """A benchmark runs on two checkouts in turns, here this one twice, and prints the ratio of every row."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "codecs.py"), "--quick", "--against", str(BENCHMARKS.parent)]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert len(rows) == 8
    assert all(" times" in row["figure"] and row["figure"] in done.stdout for row in rows)


def test_imports(tmp_path: Path) -> None:
    """The benchmark of imports runs, and prints what distwrap takes beside torch."""
    table, rows = run_quick("imports.py", tmp_path, seconds=170)
    assert len(rows) == 2
    assert all(row in table for row in rows)


def test_control_plane(tmp_path: Path) -> None:
    """The benchmark of the side channel runs with 64 ranks, all of which answer."""
    table, rows = run_quick("control_plane.py", tmp_path, seconds=170)
    assert len(rows) == 3
    assert all(row in table for row in rows)
    assert "64 ranks: 64 of them had answered" in table
