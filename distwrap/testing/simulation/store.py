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


class RingingBoard(Board):
    """Board of simulated ranks, which wait for their bells.

    Attributes:
        rings: for each rank, told when its bell was rung.
    """

    def __init__(self, scheduler: Scheduler, ranks: int) -> None:
        super().__init__(ranks=ranks, texts=True)
        self.rings = [Signal(scheduler) for _ in range(ranks)]

    def ring(self, rank: int) -> None:
        super().ring(rank)
        self.rings[rank].notify_all()

    def ring_all(self) -> None:
        for rank in range(len(self.rings)):
            self.ring(rank)


class SimulatedStore(Store):
    """Store in which simulated ranks meet.

    Args:
        scheduler: of the ranks' threads.
        ranks: their number.

    Attributes:
        board: of the ranks, beside the store.
    """

    def __init__(self, scheduler: Scheduler, ranks: int) -> None:
        super().__init__()
        self._scheduler, self._table = scheduler, HashStore()
        self._signals: defaultdict[str, Signal] = defaultdict(lambda: Signal(scheduler))
        self.board = RingingBoard(scheduler, ranks)

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
    deleteKey = partialmethod(_call, "delete_key")  # the names by which torch's own methods call these
    getNumKeys = partialmethod(_call, "num_keys")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            while not self.check([key]):
                seconds = None if timeout is None else timeout.total_seconds()
                if not self._signals[key].wait(seconds, f"the key {key!r} of the store"):
                    raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: /{key}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._table.get(key))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        return self
