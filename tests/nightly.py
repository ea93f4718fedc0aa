"""`make nightly`: rows of tests that are too long for each change, and which of them a change makes due.

    python -m tests.nightly                            # all rows
    python -m tests.nightly --rows slurm,mpi           # some of them
    python -m tests.nightly --due --seconds 600        # in CI: rows whose paths have changed, as long as there is time

A row is due when something under its paths has changed since the commit at which it was last seen to pass, which
`tests/nightly.log` says. What is due and does not fit in the time is printed as owed; so is in CI a row that has never
passed. Each row has smoke tests in `make test-all`, which run always.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LOG = Path(__file__).with_suffix(".log")
_STEP = ("distwrap/protocols.py", "distwrap/strategies", "distwrap/model", "distwrap/comm", "distwrap/precision")
_START = ("distwrap/launch", "distwrap/network", "distwrap/supervision", "distwrap/environments", "distwrap/group")


class Row(NamedTuple):
    """Row of tests.

    Attributes:
        paths: beginnings of the paths of which a change makes it due.
        words: what follows ``make``, or nothing for the tests that are marked with the row's name.
        folders: where these tests are.
        as_root: whether it needs root, as hosts of their own do.
    """

    paths: tuple[str, ...]
    words: tuple[str, ...] = ()
    folders: tuple[str, ...] = ("tests",)
    as_root: bool = False


def _engine(name: str, *more: str) -> Row:
    return Row(
        ("distwrap/protocols.py", "distwrap/strategies/base.py", f"tests/engines/{name}", *more), (f"engine-{name}",)
    )


ROWS = {
    "convert": Row(("distwrap/convert", "tests/convert"), folders=("tests/convert",)),
    "packaging": Row(
        ("setup.cfg", "setup.py", "MANIFEST.in", ".ci", ".conda", "tests/test_packaging.py", "tests/decorator")
    ),
    "notebooks": Row(("examples/notebooks", "tests/notebooks", "distwrap/launch/pickling.py")),
    "slurm": Row(
        ("distwrap/launch/slurm", "distwrap/environments", "tests/clusters"), folders=("tests/clusters",), as_root=True
    ),
    "mpi": Row(("distwrap/environments", "distwrap/network", "tests/clusters"), as_root=True),
    "hosts": Row((*_START[:4], "tests/clusters"), folders=("tests/clusters",), as_root=True),
    "hivemind": _engine("hivemind", "distwrap/strategies/hivemind"),
    "ray": _engine("ray", "distwrap/launch/ray"),
    "transformers": _engine("transformers", "distwrap/environments", "docs/howto/huggingface.md"),
    "deepspeed": _engine("deepspeed", "distwrap/strategies/deepspeed"),
    "pages": Row(("docs", "README.md", "examples"), folders=("tests/docs",)),
    "accelerator": Row(("distwrap/devices", "distwrap/comm", "tests/accelerator")),
    "faults": Row((*_START, "distwrap/checkpoint", "tests/faults")),
    "prove": Row(("distwrap/prove", "distwrap/testing", "tests/prove", *_STEP), folders=("tests/prove",)),
    "products": Row((*_STEP, "distwrap/data")),
    "benchmarks": Row(("benchmarks", "tests/test_benchmarks.py")),
    "long": Row((*_START, "distwrap/checkpoint", "tests/guarded")),
    "horovod": _engine("horovod", "distwrap/strategies/horovod.py"),
    "xla": _engine("xla", "distwrap/launch/xla", "distwrap/devices/accelerators.py"),
    "versions": Row(("distwrap/_internals", "distwrap/versions.py", "setup.cfg", "noxfile.py"), ("test-versions",)),
}
_NOT_IN_CI = ("horovod", "xla", "versions")  # they build for minutes, or bring gigabytes


class Passed(NamedTuple):
    """What the log says of a row: when it was last seen to pass, at which commit, and in how many seconds."""

    commit: str
    date: str
    seconds: int


def log() -> dict[str, Passed]:
    """Return what the log says, by row."""
    lines = [line.split() for line in LOG.read_text().splitlines() if line and not line.startswith("#")]
    return {row: Passed(commit, date, int(seconds)) for row, commit, date, seconds in lines}


def changed_since_green(row: str) -> set[str] | None:
    """Return the paths that differ between the commit at which a row last passed and the files here.

    Returns:
        Paths from the project's root; ``None`` where nobody knows: the row never passed, or git does not know when.
    """
    passed = log().get(row)
    if passed is None:
        return None
    changed = _git("diff", "--name-only", passed.commit)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    return None if changed is None or untracked is None else changed | untracked


def due(name: str) -> bool:
    """Return whether something under a row's paths has changed since it last passed."""
    changed = changed_since_green(name)
    return changed is None or any(path.startswith(ROWS[name].paths) for path in changed)


def _git(*words: str) -> set[str] | None:
    """Return the lines that git prints; ``None`` where it fails, or is not there."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines()) if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rows, and return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description="Run rows of tests.")
    parser.add_argument("--rows", default=",".join(ROWS), help="names, with commas between (default: all)")
    parser.add_argument("--due", action="store_true", help="only those whose paths have changed since they passed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long all of them may take")
    given = parser.parse_args(arguments)
    rows = given.rows.split(",")
    if unknown := set(rows) - ROWS.keys():
        parser.error(f"no such rows: {', '.join(sorted(unknown))}. There are {', '.join(ROWS)}")
    if given.due:
        rows = [row for row in rows if due(row)]
    end = time.monotonic() + given.seconds
    passed = log()
    ends: dict[str, str] = {}
    for row in rows:
        left = end - time.monotonic()
        if why := _why_owed(row, passed.get(row), left, in_ci=given.due):
            ends[row] = f"owed: {why}"
            continue
        print(f"=== nightly: {row}", flush=True)
        begun = time.monotonic()
        code = _run(ROWS[row], row, left)
        seconds = round(time.monotonic() - begun)
        ends[row] = {0: f"passed in {seconds} s", None: "owed: the time was over"}.get(code, f"FAILED in {seconds} s")
        if code == 0 and not given.due:
            _note(row, seconds)
    for row, words in ends.items():
        print(f"nightly: {row}: {words}")
    return int(any(words.startswith("FAILED") for words in ends.values()))


def _why_owed(row: str, passed: Passed | None, left: float, *, in_ci: bool) -> str:
    """Return why a row cannot be run now; empty if it can.

    Args:
        row: its name.
        passed: when it last passed.
        left: seconds that are left for it.
        in_ci: whether nobody waits for it, and a landing does.
    """
    if ROWS[row].as_root and os.geteuid() != 0:
        return "it needs root"
    if in_ci and row in _NOT_IN_CI:
        return "it takes too long here"
    if in_ci and passed is None:
        return "it has never passed, so nobody knows how long it takes"
    return "there is no time left" if left <= 0 or (passed is not None and passed.seconds > left) else ""


def _run(row: Row, name: str, seconds: float) -> int | None:
    """Run a row, and return its exit code; ``None`` if it has not ended in time, and was ended."""
    jobs = os.environ.get("JOBS", "-n 3").split()
    marked = [sys.executable, "-m", "pytest", *jobs, "--tier", "nightly", "-m", f'nightly(row="{name}")']
    command = ["make", *row.words] if row.words else [*marked, *row.folders]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(None if seconds == float("inf") else seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None
    return code


def _note(row: str, seconds: int) -> None:
    """Write into the log that a row has passed with the files as they are, unless they are not committed."""
    here = _git("rev-parse", "--short=12", "HEAD")
    if not here or _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/nightly.log") != set():
        print(f"nightly: {row} is not noted, since what it ran on is not committed")
        return
    lines = {**log(), row: Passed(here.pop(), datetime.now(timezone.utc).date().isoformat(), seconds)}
    head = "# Rows of `make nightly`: the commit at which each last passed, the day, and seconds.\n"
    order = {name: number for number, name in enumerate(ROWS)}
    texts = [f"{name} {each.commit} {each.date} {each.seconds}\n" for name, each in lines.items()]
    LOG.write_text(head + "".join(sorted(texts, key=lambda text: order.get(text.split()[0], len(order)))))


if __name__ == "__main__":
    sys.exit(main())
