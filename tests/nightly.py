"""What `make nightly` has shown, and when: one line a row of it in tests/nightly.log."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOG = Path(__file__).with_suffix(".log")


def changed_since_green(row: str) -> set[str] | None:
    """Return the paths that differ from the commit at which all of a row was green; ``None`` if that is not known."""
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    commits = [line.split()[1] for line in lines if line.split()[:1] == [row]]
    if not commits:
        return None
    found: set[str] = set()
    for words in (["diff", "--name-only", commits[-1]], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:  # no repository, or one without its past
            return None
        found |= set(done.stdout.splitlines())
    return found
