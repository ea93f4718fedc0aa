"""Running runs of this user on this node, read by another process: each rank shows where it is on the node's board."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distwrap.environments.identity import process_status
from distwrap.network.waiting import wait_until
from distwrap.supervision.shared_status import BOARD, SharedStatus
from distwrap.wording import named_ranks

NAME, ANSWER = "where", "told"  # names of notes: where a rank is, and where all ranks are
_ASK_SECONDS = 5.0  # for a rank to ask all others


@dataclass(frozen=True)
class Shown:
    """Location that a rank has last shown.

    Attributes:
        rank: its number.
        location: the values of a `Location`; ``None`` if it has left.
        time: the time of day at which it showed this.
    """

    rank: int
    location: list[Any] | None
    time: float


@dataclass(frozen=True)
class Run:
    """Run that is going on on this node.

    Attributes:
        holder: the process that called it, if that has the run's board open; otherwise the first of its ranks.
        processes: all processes that have its board open, and those that have started them.
        shown: what each of its ranks on this node has last shown.
        ranks: the number of its ranks on all nodes.
        board: the path of its board.
    """

    holder: int
    processes: set[int]
    shown: list[Shown]
    ranks: int
    board: str = ""

    @property
    def elsewhere(self) -> str:
        """Words about ranks that show nothing here; empty if all ranks do."""
        missing = set(range(self.ranks)) - {shown.rank for shown in self.shown}
        if not missing:
            return ""
        return f"{named_ranks(missing)} {'is' if len(missing) == 1 else 'are'} on another node, or not started yet"


def runs() -> list[Run]:
    """Return the runs of this user on this node, with what their ranks have last shown."""
    boards: dict[tuple[int, int], str] = {}
    holders: dict[tuple[int, int], list[int]] = {}
    for process in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        for path, number in _boards_of(process):
            boards.setdefault(number, path)
            holders.setdefault(number, []).append(process)
    found = []
    for number, path in boards.items():
        with suppress(OSError):
            ranks, shown = _shown_on(path)
            if shown:
                above = {process: _above(process) for process in holders[number]}
                first = next(process for process in above if above[process].isdisjoint(above))
                found.append(Run(first, set(above).union(*above.values()), shown, ranks, path))
    return found


def _boards_of(process: int) -> list[tuple[str, tuple[int, int]]]:
    """Return the boards of this user that a process has open, each with its number; none if the process is gone."""
    boards = []
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{fd}"
            with suppress(OSError):
                if os.path.basename(os.readlink(path)).removeprefix("memfd:").startswith(BOARD):
                    file = os.stat(path)
                    if file.st_uid == os.geteuid():  # root could read others' too
                        boards.append((path, (file.st_dev, file.st_ino)))
    return boards


def _above(process: int) -> set[int]:
    """Return the processes that have started a process, directly or not."""
    found = set()
    with suppress(OSError, ValueError):
        while process := int(process_status(process)[1][1]):
            found.add(process)
    return found


def where_all_are(run: Run) -> str:
    """Ask a rank of this node where the ranks of all nodes are; return its answer, or an empty text without one."""
    with suppress(OSError):
        board, _ = _opened(run.board)
        rank = max(run.shown, key=lambda shown: shown.time).rank
        before = board.read(rank).get(ANSWER)
        board.ask(rank)
        told = wait_until(lambda: board.read(rank).get(ANSWER) not in (None, before), _ASK_SECONDS)
        return str(board.read(rank)[ANSWER][1]) if told else ""
    return ""


def _opened(path: str) -> tuple[SharedStatus, int]:
    """Return a board, and the number of ranks for which it is made.

    Raises:
        OSError: the board is gone, or no rank has arrived yet.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        ranks = SharedStatus.ranks_in(os.fstat(fd).st_size)
        if not ranks:
            raise FileNotFoundError(path)
        return SharedStatus(fd, ranks, texts=True), ranks
    finally:
        os.close(fd)


def _shown_on(path: str) -> tuple[int, list[Shown]]:
    """Return the number of ranks for which a board is made, and what ranks have shown on it."""
    board, ranks = _opened(path)
    found = []
    for rank in range(ranks):
        with suppress(TypeError):  # of another version of distwrap
            found.append(Shown(**board.read(rank).get(NAME, {})))
    return ranks, found
