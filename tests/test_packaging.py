"""The source distribution is complete: it can be unpacked, read and tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = (
    ".git",
    ".venv",
    ".ci-venv",
    ".*_cache",
    ".nox",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
    "*.egg-info",
    "*.pt",
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from a copy of the working tree and unpacked."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_COPIED))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder)],
        cwd=folder / "source",
        check=True,
        capture_output=True,
        timeout=60,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_everything_of_the_repository_is_in_it(unpacked: Path) -> None:
    """The package, its tests with their helpers, the documentation, the examples and the Makefile are there."""
    for folder in ("distwrap", "tests", "docs", "examples", "benchmarks", ".ci"):
        ours = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        kept = {path for path in ours if "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pt")}
        assert {path for path in kept if not (unpacked / path).exists()} == set()
    assert all((unpacked / name).exists() for name in ("Makefile", "LICENSE", "constraints.txt", "setup.cfg"))


def test_page_of_the_package(unpacked: Path) -> None:
    """The page of the package has the README, without links into the repository, which would lead nowhere there."""
    page = (unpacked / "PKG-INFO").read_text()
    assert "@distributed(nprocs=2" in page
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith(("http", "#"))]


def test_tests_run_from_it(unpacked: Path) -> None:
    """Tests can be run from the unpacked distribution."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_declared_options.py"],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
