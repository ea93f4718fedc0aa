"""Status that ranks of one node share, in memory of fixed size: for each a wake-up flag, and what it writes anew."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from typing import TYPE_CHECKING, Any

from distwrap.network.keys import read

if TYPE_CHECKING:  # the command `where` reads boards without torch
    from torch.distributed import Store  # type: ignore[attr-defined]

BOARD = "distwrap-board"  # the beginning of the names of boards, for the system
_TEXT = 1 << 14  # bytes for what a rank writes, twice; the system gives only the pages that are written to
_PER_RANK = 2 * _TEXT
_HEAD = 9  # of them, for which of the two counts, the length and the sum
_NOTIFIED, _ASKED = 1, 2  # values of a flag
_HELD = "distwrap board"  # key of the path to the board that a launcher on this node holds


class SharedStatus:
    """Shared memory with a wake-up flag for each rank, and with the texts that a rank replaces again and again.

    A flag has one reader, the rank itself, which consumes it before it looks for the news: who has news writes it first
    and notifies then, so none is missed.

    Args:
        fd: of the memory, which grows to its size; by default this process's own memory.
        ranks: number of notifier.
        texts: whether there is room for texts too.
    """

    def __init__(self, fd: int = -1, ranks: int = 1, *, texts: bool = False) -> None:
        self._notifier = -(-ranks // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._notifier + _PER_RANK * ranks * texts
        if fd >= 0 and os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._memory, self._ranks = mmap.mmap(fd, size), ranks

    @staticmethod
    def ranks_in(size: int) -> int:
        """Return how many ranks a board with texts of a size is for."""
        return size // (_PER_RANK + 1)  # the byte is the flag, of which whole pages are taken

    def notify(self, rank: int) -> None:
        """Notify one rank."""
        self._memory[rank] = _NOTIFIED

    def ask(self, rank: int) -> None:
        """Set one rank's flag in another way, by which a process that is no rank asks where all ranks are."""
        self._memory[rank] = _ASKED

    def notify_all(self) -> None:
        """Notify every rank."""
        self._memory[: self._ranks] = b"\1" * self._ranks

    def take(self, rank: int) -> tuple[bool, bool]:
        """Return whether a rank was notified, and whether it was asked, and consume that."""
        value = self._memory[rank]
        if value:
            self._memory[rank] = 0
        return value > 0, value == _ASKED

    def write(self, rank: int, texts: dict[str, Any], spare: int = 0) -> bool:
        """Replace a rank's texts; return whether there was room, with so many bytes to spare.

        A reader never takes half of them: they come beside the last ones, with their sum, and then a byte says where.
        """
        data = json.dumps(texts).encode()
        if len(data) >= _TEXT - _HEAD - spare:
            return False
        start = self._notifier + 2 * _TEXT * rank
        half = 1 - self._memory[start]
        place = start + half * _TEXT + 1
        head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
        self._memory[place : place + 8 + len(data)] = head + data
        self._memory[start] = half
        return True

    def read(self, rank: int) -> dict[str, Any]:
        """Return a rank's texts."""
        start = self._notifier + 2 * _TEXT * rank
        while True:
            place = start + self._memory[start] * _TEXT + 1
            head = self._memory[place : place + 8]
            data = self._memory[place + 8 : place + 8 + int.from_bytes(head[:4], "little")]
            if zlib.crc32(data) == int.from_bytes(head[4:], "little"):  # else it was written over meanwhile
                found: dict[str, Any] = json.loads(data or b"{}")
                return found


def hold(path: str, board: str) -> None:
    """Let the ranks that meet in a file find the board that their launcher holds beside it.

    Args:
        path: of the file.
        board: path of the board, which is a file too, and made where there is none.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    open(board, "ab").close()
    FileStore(path).set(_HELD, board)


def held(store: Store, ranks: int) -> SharedStatus | None:
    """Return the board that the launcher of all ranks holds on this node; ``None`` where there is none."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    file = getattr(store, "underlying_store", None)
    if isinstance(shared := getattr(file, "board", None), SharedStatus):  # of ranks that are simulated in this process
        return shared
    path = read(file, _HELD).decode() if isinstance(file, FileStore) else ""
    if not path:
        return None
    fd = os.open(path, os.O_RDWR)
    try:
        return SharedStatus(fd, ranks, texts=True)
    finally:
        os.close(fd)  # the memory stays mapped
