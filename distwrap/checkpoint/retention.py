"""Keep the last few checkpoints: a numbered series with a link to the latest, or the predecessors of one name."""

import os
import re
import shutil
from pathlib import Path

from distwrap.checkpoint import files
from distwrap.checks import is_whole
from distwrap.errors import OptionError

_NUMBER = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)


def check_keep(keep: int | None) -> None:
    """Raise an error for what is no number of checkpoints.

    Raises:
        OptionError: says so.
    """
    if keep is not None and not is_whole(keep, 1):
        raise OptionError(f"save(keep={keep!r}): it must be a whole number from 1, or None to keep all.")


def latest_of(path: Path) -> Path | None:
    """Return the link to the latest of a numbered series: ``step-latest.pt`` for ``step-100.pt``; else ``None``.

    Example:
        >>> latest_of(Path("runs/step-100.pt")).name, latest_of(Path("last.pt"))
        ('step-latest.pt', None)
    """
    prefix, number, suffix = _split(path)
    return path.with_name(f"{prefix}latest{suffix}") if number else None


def keep_predecessors(path: Path, keep: int | None) -> None:
    """Keep what a name without a number holds before it is replaced: as ``last.pt.1``, the one before as ``.2``."""
    if keep is None or latest_of(path) is not None or not path.exists():
        return
    for number in range(keep - 1, 0, -1):
        older = path if number == 1 else _numbered(path, number - 1)
        if older.exists():
            temporary = path.parent / f".{path.name}.aside.tmp"
            temporary.unlink(missing_ok=True)
            os.link(older, temporary)  # the name itself is never without its file
            os.replace(temporary, _numbered(path, number))


def prune(path: Path, keep: int | None) -> None:
    """Let the link of a numbered series point to its newest checkpoint, and then remove the oldest ones."""
    latest = latest_of(path)
    if keep is None or latest is None:
        return
    files.point(latest, path)
    prefix, _, suffix = _split(path)
    series = []
    for other in path.parent.iterdir():
        begins, number, ends = _split(other)
        if number and (begins, ends) == (prefix, suffix):
            series.append((int(number), other))
    for _, other in sorted(series, reverse=True)[keep:]:
        if other == path:
            continue
        if other.is_dir():
            shutil.rmtree(other)
        else:
            other.unlink(missing_ok=True)


def _split(path: Path) -> tuple[str, str, str]:
    """Split a name at its number; all empty where it has none."""
    parts = _NUMBER.fullmatch(path.stem)
    return ("", "", "") if parts is None else (parts[1], parts[2], f"{parts[3]}{path.suffix}")


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
