"""Values of keys in a store, by one operation where the store has it.

A key that its owner may delete is read by `find` alone. Between `check` and `get` the key may go, and `get` would wait
for it until the store's time limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command `where` comes here without torch
    from torch.distributed import Store  # type: ignore[attr-defined]


_ABSENT = "\0"  # a value that nobody writes


def find(store: Store, key: str) -> bytes | None:
    """Return the value of a key, by one operation that never waits; ``None`` if it is not set.

    A store's `compare_set` returns what stands there, or the value that it was to find where nothing does. A server of
    torch's then also wakes whoever waits for the key by the store's own `get` or `wait`, so nobody may.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


def read(store: Store, key: str) -> bytes:
    """Return the value of a key; empty if it is not set."""
    return find(store, key) or b""


def read_all(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of keys that are all set, by one operation where the store has it."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def set_all(store: Store, texts: dict[str, str]) -> None:
    """Set keys, by one operation where the store has it."""
    if texts and store.has_extended_api():  # type: ignore[attr-defined]
        store.multi_set(list(texts), list(texts.values()))  # type: ignore[attr-defined]
        return
    for key, text in texts.items():
        store.set(key, text)


def count(store: Store, key: str) -> int:
    """Return the value of a counter; 0 if it was never counted up."""
    return int(find(store, key) or 0)
