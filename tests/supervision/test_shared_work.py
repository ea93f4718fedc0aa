"""Answers to what other ranks ask for."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from distwrap.environments import Placement
from distwrap.errors import CollectiveError, WorkerDiedError
from distwrap.network import stores
from distwrap.network.signed_texts import SignedTexts
from distwrap.network.stores import client_of
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import Channel
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.shared_work import LOOK_SECONDS, SILENT_SECONDS, SharedWork
from tests.clock import FastClock
from tests.limits import SOON


@pytest.mark.parametrize("on_one_node", [True, False])
def test_answers_come_when_it_is_time_and_leave_nothing_in_the_store(on_one_node: bool) -> None:
    """Each of several ranks gets its own answer, the later one perhaps first, by a file or by the store."""
    store, port = stores.serve("127.0.0.1", [0], "mine", 10)
    store.set("here/0", "{}")
    address = None if on_one_node else "127.0.0.1"
    places = [Placement(rank, 3, master_addr=address) for rank in range(3)]
    clients = [stores.connect("127.0.0.1", [port], "mine", 10, "a rank")[0] for _ in range(3)]
    rings = [Notifier(client, place) for client, place in zip(clients, places, strict=True)]
    texts = [SignedTexts(client, b"") for client in clients]
    works = [SharedWork(*each, Activity(None), supervised=True) for each in zip(rings, texts, places, strict=True)]
    before = store.num_keys()
    taken: list[int] = []

    def make(request: Any, waited: float) -> bytes | None:
        if request == 1 and 2 not in taken:
            return None
        taken.append(request)
        return bytes([request]) * 1000

    works[0].serve("thing", make)
    works[0].look()
    found: dict[int, bytes] = {}
    asking = [
        threading.Thread(target=lambda n=n: found.update({n: works[n].ask("thing", 0, n)}))  # type: ignore[misc]
        for n in (1, 2)
    ]
    for thread in asking:
        thread.start()
    while any(thread.is_alive() for thread in asking):
        works[0].look()
        time.sleep(0.01)
    assert taken == [2, 1]
    assert found == {1: bytes([1]) * 1000, 2: bytes([2]) * 1000}
    deadline = time.monotonic() + SOON
    while store.num_keys() > before + 2:  # the count of questions, and that rank 0 is waited for
        assert time.monotonic() < deadline
        works[0].look()
        time.sleep(0.01)
    for each in rings:
        each.close()


def test_no_file_is_written_that_is_named_over_a_network(tmp_path: Path) -> None:
    """An answer goes into the asker's file only where the ranks' store is a file of their launcher's."""
    store, _ = stores.serve("127.0.0.1", [0], "mine", 10)
    place = Placement(0, 2, master_addr="127.0.0.1")
    notifier, precious = Notifier(store, place), tmp_path / "precious"
    precious.write_text("mine")
    work = SharedWork(notifier, SignedTexts(store, b""), place, Activity(None), supervised=True)
    work.serve("thing", lambda request, waited: b"other")
    store.add("asked/thing", 1)
    SignedTexts(store, b"").set("ask/thing/1", json.dumps([0, str(precious), 1, "token"]))
    work.look()
    assert store.check(["work/thing/1/token"])
    assert precious.read_text() == "mine"
    notifier.close()


def test_a_question_may_come_before_it_is_served() -> None:
    """A rank that was rung before it served what it is asked for looks again once it does."""
    store, _ = stores.serve("127.0.0.1", [0], "mine", 10)
    place = Placement(0, 2, master_addr="127.0.0.1")
    notifier = Notifier(store, place)
    channel = Channel(notifier, place, Activity(None), True, 100.0, b"")
    store.add("asked/thing", 1)
    SignedTexts(store, b"").set("ask/thing/1", json.dumps([0, "", 1, "token"]))
    notifier.notify(0)
    channel.look()
    channel.work.serve("thing", lambda request, waited: b"answer")
    channel.look()
    assert store.check(["work/thing/1/token"])
    notifier.close()


def test_who_waits_hears_at_once_that_a_rank_leaves() -> None:
    """A rank that is waited for, and leaves in order without the work, rings: nobody looks for it before long."""
    store, _ = stores.serve("127.0.0.1", [0], "mine", 10)
    places = [Placement(rank, 2, master_addr="127.0.0.1") for rank in range(2)]
    rings = [Notifier(client_of(store), place) for place in places]
    activities, waits = [Activity(None) for _ in places], list[object]()
    works = [
        SharedWork(notifier, SignedTexts(notifier.store, b""), place, each, supervised=True)
        for notifier, place, each in zip(rings, places, activities, strict=True)
    ]
    store.set("here/0", "{}")

    def leave() -> None:
        begun = activities[1].wait_begun
        waits.append(begun and (begun.kind, begun.peers))
        works[0].leave(failed=False)

    leaving = threading.Timer(0.5, leave)
    leaving.start()
    start = time.monotonic()
    with pytest.raises(CollectiveError, match="has left"):
        works[1].wait_for("thing", 0)
    assert waits == [("work", (0,))], "a rank that waits for work says so, and is no stall"
    assert activities[1].wait_begun is None
    assert time.monotonic() - start < LOOK_SECONDS / 2
    leaving.join()
    for notifier in rings:
        notifier.close()


class Working(FastClock):
    """Clock in whose time a rank on another node works for 300 s, and then publishes; it may say that it is there."""

    def __init__(self, store: HashStore, notes: bool) -> None:
        super().__init__()
        self._store, self._notes = store, notes

    def sleep(self, seconds: float, /) -> None:
        super().sleep(seconds)
        if self._notes:
            self._store.set("seen/0", f"{self.now // 5}")
        if self.now > 1300:
            SignedTexts(self._store, b"").set("work/thing", b"made".hex())


@pytest.mark.parametrize("notes", [True, False])
def test_work_of_a_rank_on_another_node_takes_as_long_as_it_lives(notes: bool) -> None:
    """Who notes now and then where it is lives; who has not for two minutes counts as gone, and is named."""
    store, place = HashStore(), Placement(1, 2, 0, 1, 1, 2, master_addr="127.0.0.1")
    store.set("here/0", json.dumps({"node": "another", "host": "over there", "pid": 7}))
    notifier = Notifier(store, place, Working(store, notes))
    work = SharedWork(notifier, SignedTexts(store, b""), place, Activity(None), supervised=False)
    if notes:
        assert work.wait_for("thing", 0) == b"made"
    else:
        with pytest.raises(WorkerDiedError, match=r"over there .*process is gone"):
            work.wait_for("thing", 0)
        assert SILENT_SECONDS <= notifier.clock.monotonic() - 1000 <= SILENT_SECONDS + 2 * LOOK_SECONDS
    notifier.close()
