"""Values of keys in a store, by one operation where the store has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command `where` comes here without torch
    from torch.distributed import Store  # type: ignore[attr-defined]


def read(store: Store, key: str) -> bytes:
    """Return the value of a key; empty if it is not set."""
    value: bytes = store.get(key) if store.check([key]) else b""
    return value


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
    return int(store.add(key, 0)) if store.check([key]) else 0
