"""Notifier: a rank that has news for another notifies it, so that no rank has to look at the store again and again.

Ranks of one node share a board. Where ranks are elsewhere too, each board has a mailbox in the store, a key for which
one of its ranks waits, which costs the store nothing; that rank then notifies the ranks of the board.
"""

import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.environments.identity import node
from distwrap.network import memory_file
from distwrap.network.keys import count, find, read, set_all
from distwrap.network.waiting import Clock, Found, wait_until
from distwrap.supervision.shared_status import BOARD, SharedStatus, held
from distwrap.versions import STORES_CLONE

_NO_LIMIT = timedelta(days=7)  # torch complains on standard error when a wait comes to its limit
_CLOSE_SECONDS = 10.0  # for a thread in the store's native code to come out of it, also where all cores are busy
_POLL_SECONDS = 1.0  # between looks at the mailbox where the store cannot be waited for, and after it was lost


class Notifier:
    """This rank's wake-ups, and the way to notify the others.

    Args:
        store: the ranks', a client of its own.
        placement: this rank's place.
        clock: the clock by which this rank waits to be notified.

    Attributes:
        store: the ranks'.
        board: shared with other ranks of this node.
        is_held: whether all ranks share the board, which their launcher holds.
        clock: the clock of this rank's side channel.
    """

    def __init__(self, store: Store, placement: Placement, clock: Clock = time) -> None:
        self.store, self._rank, self._ranks, self.clock = store, placement.rank, placement.world_size, clock
        self._wakeups, self._asked, self._lock, self._stopped = 0, False, threading.Lock(), threading.Event()
        self._fd = -1
        self._waiter: threading.Thread | None = None  # until it starts it would hold this object, and so the store
        board = held(store, placement.world_size)
        self.is_held = board is not None
        self.board, self._box = (board, 0) if board is not None else self._share_board(placement.world_size)
        if self.is_held:
            self.board.write(self._rank, {})  # a rank before this one may have left notes there
        else:
            store.set(f"box/{self._rank}", str(self._box))
            self.listen()

    def _share_board(self, world_size: int) -> tuple[SharedStatus, int]:
        """Return the board of this node's ranks, made by the first that comes, and the number of its mailbox."""
        key = f"board/{node()}"
        box = 0
        if memory_file.ARE_POSSIBLE:
            if find(self.store, key) is None:
                box, name = int(self.store.add("boxes", 1)), f"{BOARD}-{secrets.token_hex(8)}"
                self._fd = memory_file.make(name)
                mine = json.dumps([box, memory_file.path_of(self._fd), name])
                if self.store.compare_set(key, "", mine).decode() == mine:
                    return SharedStatus(self._fd, world_size, texts=True), box
                os.close(self._fd)
                self._fd = -1
            with suppress(OSError, TypeError, ValueError, AttributeError):  # it may be gone, or another user's
                box, path, name = json.loads(read(self.store, key))
                if name.startswith(BOARD):
                    self._fd = memory_file.open_own(path, name)
                    return SharedStatus(self._fd, world_size, texts=True), box
        return SharedStatus(ranks=world_size), int(self.store.add("boxes", 1))

    @property
    def is_shared(self) -> bool:
        """Whether other processes can see the board."""
        return self.is_held or self._fd >= 0

    def wakeups(self) -> int:
        """Return how often this rank was notified."""
        with self._lock:
            notified, asked = self.board.take(self._rank)
            self._wakeups += notified
            self._asked = self._asked or asked
            return self._wakeups

    def take_question(self) -> bool:
        """Return whether another process asks where all ranks are; true once for each question."""
        with self._lock:
            asked, self._asked = self._asked, False
            return asked

    def wait_until(
        self, find: Callable[[], Found], seconds: float, give_up: Callable[[], bool] = lambda: False
    ) -> Found:
        """Call a function at once, and again when this rank is notified, until what it returns is true; return that.

        Args:
            find: called once more after the time limit.
            seconds: time limit.
            give_up: called often; ends the time when it returns true.
        """
        deadline = self.clock.monotonic() + seconds
        while True:
            before, over = self.wakeups(), self.clock.monotonic() >= deadline or give_up()
            if (found := find()) or over:
                return found
            left = deadline - self.clock.monotonic()
            wait_until(lambda: self.wakeups() != before or give_up(), left, clock=self.clock)  # noqa: B023

    def notify(self, rank: int) -> None:
        """Let a rank look for news."""
        box = 0 if self.is_held else int(read(self.store, f"box/{rank}") or -1)  # or it looks once it is there
        if box == self._box:
            self.board.notify(rank)
        elif box > 0:
            self.store.set(f"mail/{box}", "")

    def notify_all(self) -> None:
        """Let all ranks look for news."""
        self.board.notify_all()
        if not self.is_held:
            notify_boxes(self.store, self._ranks, besides=self._box)

    def listen(self) -> None:
        """Wait for the board's mail from now on, until this process ends, unless another rank of the board does."""
        if self.is_held or self._waiter is not None:
            return
        with suppress(BlockingIOError):
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._waiter = threading.Thread(target=self._wait_for_mail, name="distwrap-mail", daemon=True)
            self._waiter.start()

    def close(self) -> None:
        """Leave the mail to another rank of the board."""
        self._stopped.set()
        if self._waiter is not None and self._waiter.is_alive():
            with suppress(RuntimeError):
                self.store.set(f"mail/{self._box}", "")  # the next to listen finds it there
            self._waiter.join(_CLOSE_SECONDS)  # the interpreter's end would abort where it finds it in there
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # a forked process may have it too
            os.close(self._fd)
            self._fd = -1
        # The map of the board holds a descriptor, until the collector comes to this object.
        self.is_held, self.board = False, SharedStatus(ranks=self._ranks)

    def _wait_for_mail(self) -> None:
        mail, client = f"mail/{self._box}", None
        # A store that cannot set many keys at once is no server either.
        waits = STORES_CLONE and self.store.has_extended_api()  # type: ignore[attr-defined]
        while not self._stopped.is_set():
            try:
                if waits:
                    client = client or self.store.clone()  # type: ignore[attr-defined]
                    client.wait([mail], _NO_LIMIT)
                elif self._stopped.wait(_POLL_SECONDS) or not self.store.check([mail]):
                    continue
                if self._stopped.is_set():
                    return
                self.store.delete_key(mail)
            except RuntimeError:  # the store is gone, which each rank finds as it looks
                waits = False
            self.board.notify_all()


def notify_from_outside(store: Store, ranks: int) -> None:
    """Let all ranks look for news, in a process that is none of them."""
    board = held(store, ranks)
    if board is not None:
        board.notify_all()
    else:
        notify_boxes(store, ranks)


def notify_boxes(store: Store, ranks: int, besides: int = 0) -> None:
    """Notify the ranks of all boards but one."""
    boxes = min(count(store, "boxes"), 2 * ranks)  # as many as ranks can have made, whatever the store says
    set_all(store, {f"mail/{box}": "" for box in range(1, boxes + 1) if box != besides})
