"""Each folder is of one package, and is collected where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGES = {"slurm": "submitit"}  # of a folder, where it has another name

_HERE = Path(__file__).parent

collect_ignore = [
    each.name for each in _HERE.iterdir() if each.is_dir() and find_spec(PACKAGES.get(each.name, each.name)) is None
]
