"""Notes: values that a rank leaves for others to read, each in place of the last of its name; nobody is notified.

Ranks that share a board which their launcher holds find them there, where a look costs nothing. Others find them in the
store, and so do all where the board has no room.
"""

import json
import threading
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.network.keys import read
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.shared_status import held

_MORE = "more"  # on the board of a rank for which it had no room
_SPARE = 2048  # bytes of the board for where the rank is, whatever else it notes


class RankNotes:
    """This rank's notes, and a look at those that other ranks have left on the board.

    Args:
        notifier: of the ranks, whose board it is.
        rank: this one.
    """

    def __init__(self, notifier: Notifier, rank: int) -> None:
        self._notifier, self._rank = notifier, rank
        self._lock = threading.Lock()
        self._on_board: dict[str, Any] = {}

    def write(self, name: str, value: Any) -> None:
        """Note a value, on the board or else in the store.

        Args:
            name: by which it is read.
            value: as JSON has it.
        """
        if not self.write_on_board(name, value, spare=0):
            self._notifier.store.set(f"{name}/{self._rank}", json.dumps(value))

    def read(self, name: str, rank: int) -> Any:
        """Return the value that a rank has last noted under a name, wherever that is; ``None`` without one."""
        return read_note(self._notifier.store, name, rank)

    def write_on_board(self, name: str, value: Any, spare: int = _SPARE) -> bool:
        """Note a value on the board alone; return whether all ranks share the board, and it has room.

        Args:
            name: by which it is read.
            value: as JSON has it.
            spare: bytes to leave for what is noted most often.
        """
        return self._notifier.is_held and self._put(name, value, spare)

    def show(self, name: str, value: Any) -> None:
        """Show a value on the board of this node, if there is one, to other processes."""
        if self._notifier.is_shared:
            self._put(name, value, _SPARE)

    def _put(self, name: str, value: Any, spare: int) -> bool:
        with self._lock:
            self._on_board[name] = value
            has_room = self._notifier.board.write(self._rank, self._on_board, spare)
            if not has_room:
                del self._on_board[name]
                self._on_board[_MORE] = True
                self._notifier.board.write(self._rank, self._on_board)  # what it noted before is no longer true
            return has_room

    def erase_from_board(self, name: str) -> bool:
        """Erase the value that this rank has noted under a name; return whether it was on the board."""
        with self._lock:
            if self._on_board.pop(name, None) is None:
                return False
            return self._notifier.board.write(self._rank, self._on_board)

    def read_on_board(self, name: str, rank: int) -> tuple[Any, bool]:
        """Return what a rank has noted on the board by a name, or ``None``, and whether it has noted more elsewhere."""
        if not self._notifier.is_held:
            return None, True
        noted = self._notifier.board.read(rank)
        return noted.get(name), _MORE in noted


def read_note(store: Store, name: str, rank: int) -> Any:
    """Return what a rank has last noted by a name, on the board or in the store; ``None`` where it has not.

    Args:
        store: the ranks'.
        name: given to `RankNotes.write`.
        rank: the other rank.
    """
    board = held(store, rank + 1)
    if board is not None and (noted := board.read(rank).get(name)) is not None:
        return noted
    text = read(store, f"{name}/{rank}")
    return json.loads(text) if text else None
