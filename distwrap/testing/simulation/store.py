"""Store of simulated ranks: torch's own table, and threads that give up their turn while they wait for a key."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from distwrap.supervision.board import Board
from distwrap.testing.simulation.scheduler import Scheduler, Signal


class _Board(Board):
    """Board of ranks of one process, which need not write their texts down."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks=ranks)
        self._of = [dict[str, Any]() for _ in range(ranks)]

    def write(self, rank: int, texts: dict[str, Any], spare: int = 0) -> bool:
        self._of[rank] = dict(texts)
        return True

    def read(self, rank: int) -> dict[str, Any]:
        return self._of[rank]


class SimulatedStore(Store):
    """Store in which simulated ranks meet.

    Args:
        scheduler: of the ranks' threads.
        ranks: their number.

    Attributes:
        board: of the ranks, beside the store.
    """

    timeout = timedelta(minutes=30)

    def __init__(self, scheduler: Scheduler, ranks: int) -> None:
        super().__init__()
        self._scheduler, self._table = scheduler, HashStore()
        self._signals: defaultdict[str, Signal] = defaultdict(lambda: Signal(scheduler))
        self.board = _Board(ranks)

    def _call(self, name: str, *args: Any) -> Any:
        key = args[0] if args else ""
        if self._scheduler.current() is not None:  # the caller of the simulation reads it too
            self._scheduler.event(f"store.{name}({key!r})")
        found = getattr(self._table, name)(*args)
        if name in ("set", "add", "append", "compare_set") and key in self._signals:
            self._signals.pop(key).notify_all()
        return found

    set = partialmethod(_call, "set")
    add = partialmethod(_call, "add")
    append = partialmethod(_call, "append")
    check = partialmethod(_call, "check")
    compare_set = partialmethod(_call, "compare_set")
    delete_key = partialmethod(_call, "delete_key")
    num_keys = partialmethod(_call, "num_keys")
    list_keys = partialmethod(_call, "list_keys")
    deleteKey, getNumKeys = delete_key, num_keys  # the names by which torch's native stores call them

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            while not self.check([key]):
                seconds = None if timeout is None else timeout.total_seconds()
                if not self._signals[key].wait(seconds, f"the key {key!r} of the store"):
                    raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: /{key}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._table.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
