"""Store of simulated ranks: a table in this process, and threads that give up their turn while they wait for a key."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.supervision.board import Board
from distwrap.testing.simulation.scheduler import Scheduler, Signal


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
        self._scheduler, self._values = scheduler, dict[str, bytes]()
        self._queues: defaultdict[str, list[bytes]] = defaultdict(list)
        self._signals: defaultdict[str, Signal] = defaultdict(Signal)
        self._timeout = timedelta(minutes=30)
        self.board = Board(ranks=ranks, texts=True)

    def _event(self, what: str, key: str) -> None:
        if self._scheduler.current() is not None:  # the caller of the simulation reads it too
            self._scheduler.event(f"store.{what}({key!r})")

    def _write(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if key in self._signals:
            self._scheduler.notify(self._signals.pop(key))

    def set(self, key: str, value: Any) -> None:
        self._event("set", key)
        self._write(key, _as_bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._event("compare_set", key)
        found, wanted, new = self._values.get(key), _as_bytes(expected), _as_bytes(desired)
        if found == wanted or (found is None and not wanted):
            self._write(key, new)
            return new
        return wanted if found is None else found

    def add(self, key: str, amount: int) -> int:
        self._event("add", key)
        value = int(self._values.get(key, b"0")) + amount
        self._write(key, str(value).encode())
        return value

    def append(self, key: str, value: Any) -> None:
        self._event("append", key)
        self._write(key, self._values.get(key, b"") + _as_bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._event("wait", keys[0] if keys else "")
        for key in keys:
            while key not in self._values:
                seconds = None if timeout is None else timeout.total_seconds()
                if not self._scheduler.wait(self._signals[key], f"the key {key!r} of the store", seconds):
                    raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: /{key}")

    def check(self, keys: list[str]) -> bool:
        self._event("check", keys[0] if keys else "")
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        self._event("delete_key", key)
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # the names by which torch's native stores call it

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: Any) -> None:
        self._queues[key].append(_as_bytes(value))
        self._scheduler.notify(self._signals[f"queue {key}"])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        while not self._queues[key]:
            if not block:
                raise dist.QueueEmptyError(f"the queue {key!r} is empty")
            self._scheduler.wait(self._signals[f"queue {key}"], f"the queue {key!r} of the store")
        return self._queues[key].pop(0)

    def queue_len(self, key: str) -> int:
        return len(self._queues[key])

    def num_keys(self) -> int:
        return len(self._values)

    getNumKeys = num_keys

    def list_keys(self) -> list[str]:
        return list(self._values)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
