"""Keep the last few checkpoints: a numbered series with a link to the latest, or the predecessors of one name."""

import os
import re
import shutil
from pathlib import Path

from distwrap.checkpoint import files
from distwrap.checks import is_whole
from distwrap.errors import OptionError

_REMOVED = ".removed"  # suffix of folders that are about to be removed
_COUNTED = "(?:step|epoch|iter|iteration|ckpt|checkpoint)s?"
_SERIES = (  # a number at the end, by itself or after such a word; or elsewhere after such a word
    re.compile(rf"(|.*(?:[\W_](?<!\d\.)|{_COUNTED}))(\d+)()", re.DOTALL | re.IGNORECASE),
    re.compile(rf"(.*{_COUNTED}[\W_]?)(\d+)((?!\.\d)[\W_].*)", re.DOTALL | re.IGNORECASE),
)


def check_keep(keep: int | None) -> None:
    """Refuse a `keep` that is not a number of checkpoints.

    Raises:
        OptionError: `keep` is neither ``None`` nor a whole number from 1.
    """
    if keep is not None and not is_whole(keep, 1):
        raise OptionError(f"save(keep={keep!r}): it must be a whole number from 1, or None to keep all.")


def latest_of(path: Path) -> Path | None:
    """Return the link to the latest of a numbered series (``step-latest.pt`` for ``step-100.pt``), or ``None``.

    Example:
        >>> latest_of(Path("runs/step-100.pt")).name, latest_of(Path("resnet50.pt"))
        ('step-latest.pt', None)
    """
    prefix, number, suffix = _split(path)
    return path.with_name(f"{prefix}latest{suffix}") if number else None


def keep_predecessors(path: Path, keep: int | None) -> None:
    """Keep the old file of a name without a series as ``last.pt.1``, the one before as ``.2``."""
    if keep is None or latest_of(path) is not None or not path.exists():
        return
    for number in range(keep - 1, 0, -1):
        older = path if number == 1 else _numbered(path, number - 1)
        if older.exists():
            os.replace(files.copy_of(older), _numbered(path, number))  # the name always has a file


def prune(path: Path, keep: int | None) -> None:
    """Point the link of a numbered series to its newest checkpoint, then remove the oldest ones."""
    latest = latest_of(path)
    if keep is None or latest is None:
        return
    files.point(latest, path)
    for other in [other for other in series_of(latest) if _kind(other) == _kind(path)][keep:]:
        if other == path:
            continue
        if other.is_dir():
            other.rename(other.with_name(f".{other.name}{_REMOVED}"))  # half a folder must not keep the name
        else:
            other.unlink(missing_ok=True)
    for left in path.parent.glob(f".*{_REMOVED}"):
        shutil.rmtree(left, ignore_errors=True)


def series_of(latest: Path) -> list[Path]:
    """Return the numbered checkpoints of a link to the latest, with the highest first."""
    series = [other for other in latest.parent.iterdir() if latest_of(other) == latest]
    return sorted(series, key=lambda other: int(_split(other)[1]), reverse=True)


def _split(path: Path) -> tuple[str, str, str]:
    """Split the name of a series at its number; all parts are empty for other names."""
    parts = next(filter(None, (pattern.fullmatch(path.stem) for pattern in _SERIES)), None)
    return ("", "", "") if parts is None else (parts[1], parts[2], f"{parts[3]}{path.suffix}")


def _kind(path: Path) -> tuple[bool, bool]:
    """Return whether this is a folder, and whether it is sharded; a series has checkpoints of one kind."""
    return path.is_dir(), (path / files.SKELETON).exists()


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
