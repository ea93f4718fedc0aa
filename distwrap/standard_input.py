"""Standard input, which rank 0 alone has: several readers of one terminal or pipe would each get some of the text."""

import os
import stat
import sys
from io import TextIOBase
from typing import Any, NoReturn

from distwrap.errors import PlacementError


class NoInput(TextIOBase):
    """Standard input of a rank other than 0, which says at each read where to read.

    The descriptor beneath stays the terminal, for `distwrap.breakpoint_on`.

    Args:
        rank: the rank.
    """

    encoding = "utf-8"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @property
    def buffer(self) -> "NoInput":
        """The same for bytes."""
        return self

    def _refuse(self, *_: Any) -> NoReturn:
        raise PlacementError(
            f"rank {self._rank} has no standard input: the terminal, or what is piped into the program, is rank 0's. "
            "In the function that the ranks run, let rank 0 read for all of them: answer = "
            "distwrap.rank_zero_only(broadcast=True)(input)('question? '). In place of breakpoint(), write "
            f"distwrap.breakpoint_on({self._rank}) for a debugger on this rank, or breakpoint_on(0), on all ranks."
        )

    read = readline = readlines = __next__ = _refuse


def leave_to_rank_zero(rank: int) -> None:
    """Refuse to read standard input on a rank other than 0, unless there is nothing to read for anybody."""
    if rank > 0 and not _is_empty():
        sys.stdin = NoInput(rank)


def leave_in_script(fd: str, rank: str) -> None:
    """Leave standard input to rank 0 from the top of the script, in a rank of ``launcher="script"``.

    Args:
        fd: the descriptor of the link to rank 0, which a process that this rank starts does not have.
        rank: the rank.
    """
    try:
        is_rank = stat.S_ISSOCK(os.fstat(int(fd)).st_mode)
    except (ValueError, OSError):
        return
    if is_rank:
        leave_to_rank_zero(int(rank))


def _is_empty() -> bool:
    """Return whether standard input is closed, or /dev/null."""
    try:
        found, null = os.fstat(0), os.stat(os.devnull)
    except OSError:
        return True
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == null.st_rdev
