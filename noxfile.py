"""Runs the tests with several versions of torch and Python, each pair in an environment of its own.

make test-versions                             # quick for each pair, full for the oldest and the newest torch
nox -l                                         # lists the sessions
nox -s "quick(torch 2.6.0, Python 3.10)"       # runs one of them
nox -s "quick(torch 2.6.0, Python 3.10)" -- tests/data -n 0   # runs tests of your choice, with words for pytest

`full` is the tier of `make test`; `quick` is a few files of it, which touch every room that differs between versions.
A pair whose Python is not installed is skipped. Words for pip come by PIP_FLAGS, for example where a CPU build of torch
is to be found; pip also reads its own variables, as PIP_EXTRA_INDEX_URL. Without a CPU build an environment takes 5 GB,
so each is removed after its run; KEEP=1 keeps it. Results go to build/versions/; `python docs/versions.py` writes them
into docs/reference/versions.md.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import nox

# Each torch with the Pythons that its wheels are for: the oldest and the newest of them, and what most people have.
PAIRS = (
    ("2.6.0", "3.10"),
    ("2.6.0", "3.12"),
    ("2.9.1", "3.12"),
    ("2.13.0", "3.11"),
    ("2.13.0", "3.13"),
    ("2.14.1", "3.13"),
    ("2.15.0", "3.11"),
    ("2.15.0", "3.12"),
    ("2.15.0", "3.14"),
)
FULL = (("2.6.0", "3.10"), ("2.15.0", "3.12"))

QUICK = (
    "tests/process/test_interpreters.py",
    "tests/house/test_private_names.py",
    "tests/test_exported_members.py",
    "tests/launch/test_local.py",
    "tests/launch/test_transport.py",
    "tests/decorator/test_situations.py",
    "tests/group/test_collectives.py",
    "tests/network/test_keys.py",
    "tests/network/test_stores.py",
    "tests/supervision/test_stacks.py",
    "tests/model/test_wrap_model.py",
    "tests/model/test_accumulation.py",
    "tests/data/test_loader.py",
    "tests/data/test_workers.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/checkpoint/test_pieces_loaded.py",
    "tests/comm/test_with_ddp.py",
    "tests/precision/test_precision.py",
    "tests/conformance/test_conformance.py",
    "tests/strategies/test_fsdp.py",
    "tests/strategies/test_pipeline.py",
    "tests/timing/test_report.py",
)
RESULTS = Path(__file__).parent / "build" / "versions"
NAME = (
    "import platform, torch; print(f'torch {torch.__version__}, Python {platform.python_version()}, ' "
    "f'{platform.system()} {platform.machine()}', end='')"
)

nox.options.sessions = ["quick", "full"]
nox.options.error_on_missing_interpreters = False


def _pairs(pairs: tuple[tuple[str, str], ...]) -> list[object]:
    return [nox.param(python, torch, id=f"torch {torch}, Python {python}") for torch, python in pairs]


@nox.session
@nox.parametrize(("python", "torch"), _pairs(PAIRS))
def quick(session: nox.Session, torch: str) -> None:
    """Run a few files that touch every room."""
    _test(session, torch, "quick", list(QUICK))


@nox.session
@nox.parametrize(("python", "torch"), _pairs(FULL))
def full(session: nox.Session, torch: str) -> None:
    """Run the tier of `make test`."""
    _test(session, torch, "full", [])


def _test(session: nox.Session, torch: str, tier: str, files: list[str]) -> None:
    session.install(f"torch=={torch}", "-e", ".[test]", *shlex.split(os.environ.get("PIP_FLAGS", "")))
    chosen = [*files, "-n", "2", *session.posargs]
    results = RESULTS / f"{tier} {torch} {session.python}.xml"
    if session.posargs:  # not the tier any more: docs/versions.py reads no folder in RESULTS
        results, chosen = RESULTS / "chosen tests" / results.name, session.posargs
    try:
        name = session.run("python", "-c", NAME, silent=True)
        session.run(
            *("python", "-m", "pytest", "-m", "not slow and not nightly", *chosen),
            *(f"--junitxml={results}", "-o", f"junit_suite_name={tier}, {name}"),
        )
    finally:
        if results.exists():
            session.run("python", "docs/versions.py", "--tell", str(results))
        if not os.environ.get("KEEP"):
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)
