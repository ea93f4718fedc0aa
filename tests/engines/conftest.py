"""Each folder is of one package, and is collected where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent

collect_ignore = [each.name for each in _HERE.iterdir() if each.is_dir() and find_spec(each.name) is None]
