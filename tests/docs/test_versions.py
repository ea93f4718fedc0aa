"""The table of docs/reference/versions.md comes from pytest's results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.package import ROOT, script

versions = script("versions")
NAMED = "quick, torch 2.6.0+cu124, Python 3.10.13, Linux x86_64"


def results(folder: Path, name: str, test: str = "def test_a(): pass") -> Path:
    """Run pytest on a file of tests, and return where its results are."""
    (folder / "test_it.py").write_text(test)
    words = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", f"--junitxml={folder}/r.xml"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-o", f"junit_suite_name={name}", folder / "test_it.py"],
        cwd=folder,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return folder / "r.xml"


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_a_run_becomes_a_row(tmp_path: Path) -> None:
    """What pytest has counted is in the row, and the versions that the session has named."""
    test = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip()\ndef test_c(): 1 / 0"
    run = versions.read_results(results(tmp_path, NAMED, test))
    assert run[:5] == ("2.6.0+cu124", "3.10.13", "Linux x86_64", "quick", "1 failed, 1 passed, 1 skipped")
    page = versions.with_runs((ROOT / "docs" / "reference" / "versions.md").read_text(), [run])
    assert f"| 2.6.0+cu124 | 3.10.13 | Linux x86_64 | quick | 1 failed, 1 passed, 1 skipped | {run.day} |\n" in page
    assert versions.rows(page).count(run) == 1
    assert versions.with_runs(page, []) == page


def test_a_later_run_takes_the_place_of_an_earlier_one() -> None:
    """A row is that of the same tests with the same minor version of Python; the newest torch comes first."""
    head = f"x\n{versions.BEGIN}\n{versions.HEAD}{versions.END}\ny"
    old = versions.Run("2.6.0", "3.10.1", "Linux", "quick", "1 failed", "2026-01-01")
    new = old._replace(python="3.10.2", result="1 passed", day="2026-02-01")
    other, newest = old._replace(tier="full"), old._replace(torch="2.15.0")
    page = versions.with_runs(versions.with_runs(head, [old, other]), [new, newest])
    assert versions.rows(page) == [newest, other, new]
    assert page.startswith("x\n")
    assert page.endswith("\ny")


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_results_without_versions_are_refused(tmp_path: Path) -> None:
    """Results that no session has named are of unknown versions."""
    with pytest.raises(SystemExit, match="names no versions: its name is 'pytest'"):
        versions.read_results(results(tmp_path, "pytest"))
