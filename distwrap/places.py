"""Places in code, in words: a file and a line, or a notebook's cell and a line; and the source of code on its way."""

import linecache
import os
import re
import sys
from typing import Any, NamedTuple


class CodeSource(NamedTuple):
    """Source of code that goes to another process.

    Attributes:
        file: name of the file in which the code stands.
        cell: number of the notebook's cell that the file is; ``None`` for any other file.
        lines: the file's, where no file is there to be read, as for a cell.
    """

    file: str
    cell: int | None
    lines: tuple[str, ...]


_cells: dict[str, int] = {}  # numbers that came with code, by file


def place(file: str, line: int) -> str:
    """Put a line of code into words; every message does it by this function.

    Example:
        >>> place("/home/me/train.py", 88), place("<ipython-input-5-0f1e2d3c4b5a>", 3)
        ('train.py:88', 'cell 5, line 3')
    """
    cell = cell_of(file)
    return f"{os.path.basename(file)}:{line}" if cell is None else f"cell {cell}, line {line}"


def cell_of(file: str) -> int | None:
    """Return the number beside the notebook's cell that a file is; ``None`` for any other file.

    A cell that has run again has its latest number, as on the screen.
    """
    compiler: Any = getattr(_shell(), "compile", None)
    known = getattr(compiler, "format_code_name", None)  # ("Cell", "In[5]"); IPython below 8 has none
    words = known(file) if known is not None else None
    found = re.search(r"\d+", words[1]) if words else re.match(r"<ipython-input-(\d+)-", file)
    return int(found[found.re.groups]) if found else _cells.get(file)


def _shell() -> Any:
    """Return the IPython in which this process, or the one whose fork it is, runs a notebook's cells, if it does."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def source_of(file: str) -> CodeSource:
    """Return what a process that gets code from a file needs to show its lines, and to name its places."""
    return CodeSource(file, cell_of(file), () if os.path.isfile(file) else tuple(linecache.getlines(file)))


def learn(source: CodeSource) -> None:
    """Know from now on the lines and places of code that has come from another process."""
    if source.cell is not None:
        _cells[source.file] = source.cell
    if source.lines and not os.path.isfile(source.file):
        # Without a time of change it stays: linecache would look for the file, and forget the lines.
        linecache.cache[source.file] = (sum(map(len, source.lines)), None, list(source.lines), source.file)
