"""Kinds of scripts that can be converted: a new kind needs a file here, a row in the table, and names in `names.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from distwrap.convert.conversion import Conversion
from distwrap.convert.sources.ddp import convert_ddp, is_ddp
from distwrap.convert.sources.plain import convert_data_parallel, convert_plain, is_data_parallel
from distwrap.convert.sources.spawn import convert_spawn, is_spawn


class Source(NamedTuple):
    """A kind of script that can be converted.

    Attributes:
        applies: whether a script is of this kind.
        convert: edits the script, and returns whether this succeeded; if not, the notes say why.
        needs_loop: whether the script must have a training loop; one that starts ranks may train in another file.
    """

    applies: Callable[[Conversion], bool]
    convert: Callable[[Conversion], bool]
    needs_loop: bool = True


SOURCES = (
    Source(is_spawn, convert_spawn, needs_loop=False),
    Source(is_ddp, convert_ddp, needs_loop=False),
    Source(is_data_parallel, convert_data_parallel),
    Source(lambda conversion: True, convert_plain),
)  # the first that applies is used
