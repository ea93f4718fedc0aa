"""Keys that their owner may delete at any moment are read by one call, which never waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.network.keys import count, find, read
from distwrap.network.signed_texts import SignedTexts
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import Channel
from distwrap.supervision.notes import read_note
from distwrap.supervision.notifier import Notifier

KINDS: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: FileStore(str(path), 2),
    "hash": lambda path: HashStore(),
    "tcp": lambda path: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "tcp without libuv": lambda path: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False),
    "prefix": lambda path: PrefixStore("run", FileStore(str(path), 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_read_without_waiting(kind: str, tmp_path: Path) -> None:
    """What is set, empty, counted, deleted or was never there is told apart, and nothing is written."""
    store = KINDS[kind](tmp_path / "store")
    store.set_timeout(timedelta(seconds=60))  # which a call that waits would take
    assert find(store, "key") is None
    assert (read(store, "key"), count(store, "counted"), store.check(["key"])) == (b"", 0, False)
    store.set("key", "text")
    assert (find(store, "key"), read(store, "key")) == (b"text", b"text")
    store.set("key", "")
    assert find(store, "key") == b""
    store.delete_key("key")
    assert find(store, "key") is None
    store.add("counted", 3)
    assert (count(store, "counted"), count(store, "counted")) == (3, 3)


class Interleaved:
    """A store in which another rank deletes a key right after this one has looked at it, by any call.

    Whoever asks for a key that is gone would wait for it until the store's time limit, and fails here at once.
    """

    def __init__(self, deleted: str) -> None:
        self._store, self._deleted = HashStore(), deleted

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def interleaved(*args: Any) -> Any:
            key = args[0] if args and isinstance(args[0], str) else ""
            if name == "get" and not self._store.check([key]):
                pytest.fail(f"waits for {key!r}, which was deleted since it was looked at")
            result = call(*args)
            if name in ("check", "get", "compare_set") and self._deleted in (key, *args[0]):
                self._store.delete_key(self._deleted)
            return result

        return interleaved


def test_a_key_that_is_deleted_while_it_is_read() -> None:
    """Each way to read a key returns what stood there, or that there is nothing, and never waits."""
    ways: dict[str, Callable[[Any], object]] = {
        "note/loader/1": lambda store: SignedTexts(store, b"").read("note/loader/1"),
        "key": lambda store: read(store, "key"),
        "count": lambda store: count(store, "count"),
        "seen/1": lambda store: read_note(store, "seen", 1),
    }
    for key, way in ways.items():
        store = Interleaved(key)
        if key.startswith("note"):
            SignedTexts(store, b"").set(key, "7")  # type: ignore[arg-type]
        else:
            store.set(key, "7")
        assert way(store) in ("7", b"7", 7), key
        assert way(store) in (None, b"", 0), key


@pytest.fixture
def channel() -> Iterator[Channel]:
    """The channel of rank 0 of 2, whose store deletes what it shows."""
    store = Interleaved("")
    place = Placement(0, 2, master_addr="127.0.0.1")
    notifier = Notifier(store, place)  # type: ignore[arg-type]
    yield Channel(notifier, place, Activity(None), True, 100.0, b"")
    notifier.close()


def test_a_question_and_a_note_that_are_gone_keep_no_rank_waiting(channel: Channel) -> None:
    """Of a loader that is gone the note is erased, and of an answered question the text, while others look."""
    store: Any = channel._notifier.store
    other = SignedTexts(store, b"")
    other.set("note/loader/1", "here")
    store._deleted = "note/loader/1"
    assert (channel.noted("loader", 1), channel.noted("loader", 1)) == ("here", "")
    channel.work.serve("thing", lambda request, waited: None)  # not yet
    store.add("asked/thing", 1)
    other.set("ask/thing/1", '[0, "", 1, "token"]')
    store._deleted = "ask/thing/1"
    channel.work.look()
    channel.work.look()
