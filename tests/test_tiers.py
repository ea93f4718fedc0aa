"""What holds the tiers of tests: limits of cost, reasons beside marks, rows that a change makes due, orphans."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import conftest, nightly, orphans, started
from tests.costs import _Costs
from tests.interpreters import run_python
from tests.limits import SOON


def costs(tier: str | None, *, seconds: float = 1.0, passed: int = 1, skipped: int = 0) -> Any:
    """Return the costs of a run with limits of ten seconds and no interpreter."""
    made = object.__new__(_Costs)
    vars(made).update(_tier=tier, _scale=2.0, _limits={"processor_seconds": 10, "interpreters": 0})
    vars(made).update(_seconds=Counter(test=seconds), _interpreters=Counter(), _passed=passed, _skipped=skipped)
    return made


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (costs("test", seconds=21.0), "processor seconds"),
        (costs("test", passed=0), "no test"),
        (costs("nightly", skipped=1), "skipped"),
    ],
)
def test_a_run_that_costs_too_much_or_shows_nothing_fails(run: Any, words: str) -> None:
    """Seconds are scaled by the machine's, and a row of which a test is skipped has not been shown."""
    (problem,) = run._problems()
    assert words in problem


def test_a_run_within_its_limits_is_none() -> None:
    """On a machine that is half as fast, twice the seconds are within the limit."""
    assert costs("test", seconds=19.0, skipped=1)._problems() == []


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (pytest.mark.slow, "slow without"),
        (pytest.mark.slow(" "), "slow without"),
        (pytest.mark.nightly, "no row"),
        (pytest.mark.nightly(row="nobody", why="others"), "no row"),
        (pytest.mark.nightly(row="versions", why="others"), "no row"),  # which runs no tests by their marks
        (pytest.mark.nightly(row="products"), "no row"),
    ],
)
def test_a_mark_without_a_reason_is_refused(mark: Any, words: str, request: pytest.FixtureRequest) -> None:
    """So that no test is in no tier at all."""
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(mark)
    with pytest.raises(pytest.UsageError, match=words):
        conftest.pytest_itemcollected(item)


@pytest.mark.parametrize(
    ("changed", "is_due"),
    [(None, True), (set(), False), ({"README.md"}, False), ({"distwrap/launch/slurm_job.py"}, True)],
)
def test_a_row_is_due_when_something_under_its_paths_has_changed(
    changed: set[str] | None, is_due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where nobody knows what has changed."""
    monkeypatch.setattr(nightly, "changed_since_green", lambda row: changed)
    assert nightly.due("slurm") == is_due


def test_a_row_that_has_failed_is_not_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The log says what has passed, and the exit code that something has not."""
    ends = {"convert": 0, "faults": 1}
    log = tmp_path / "nightly.log"
    log.write_text("")
    monkeypatch.setattr(nightly, "LOG", log)
    monkeypatch.setattr(nightly, "_run", lambda row, name, seconds: ends[name])
    monkeypatch.setattr(nightly, "_git", lambda *words: {"abc"} if "rev-parse" in words else set())
    assert nightly.main(["--rows", "convert,faults"]) == 1
    assert list(nightly.log()) == ["convert"]


def test_paths_of_rows_are_there() -> None:
    """A room that is renamed takes its rows with it."""
    for row in nightly.ROWS.values():
        for path in row.paths:
            assert list(nightly.ROOT.glob(f"{path}*")), path


def test_an_orphan_is_a_child_that_is_seen() -> None:
    """A process whose parent has ended becomes a child of this one, which ends it."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '100']).pid)"
    pid = int(run_python("-c", code, timeout=SOON).stdout)
    assert orphans.is_orphan(pid)
    assert orphans.lives(pid)
    orphans.kill_orphans({pid})
    assert not orphans.lives(pid)


def test_a_child_of_our_own_is_no_orphan() -> None:
    """Who has started it waits for it, and gets its exit code."""
    with subprocess.Popen(["sh", "-c", "exit 3"]) as process:
        assert not orphans.is_orphan(process.pid)
        orphans.reaped({process.pid})
        assert process.wait(SOON) == 3


def test_an_interpreter_that_is_started_is_counted() -> None:
    """And a fork of one is not."""
    before = started.count(os.environ[started.VARIABLE])
    run_python("-c", "pass", timeout=SOON)
    assert started.count(os.environ[started.VARIABLE]) == before
    run_python("-X", "dev", "-c", "pass", timeout=SOON)  # options for which a fork comes too late
    assert started.count(os.environ[started.VARIABLE]) == before + 1
