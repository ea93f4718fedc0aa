"""The benchmark of lost ranks runs; what it measures is for a quiet machine."""

from __future__ import annotations

from pathlib import Path

from tests.test_benchmarks import run_quick


def test_lost_ranks(tmp_path: Path) -> None:
    """It kills a rank in each of the two ways, and says what that cost."""
    table, rows = run_quick("lost_ranks.py", tmp_path, seconds=110)
    assert all(row in table for row in rows)
    assert len(rows) == 1
