"""Whoever reaches the ranks' store may end a run, with words; no rank loses its channel, or believes what is not so."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.environments.identity import identity
from distwrap.errors import ArrivalError
from distwrap.network import secret, stores
from distwrap.network.signed_texts import SignedTexts
from distwrap.network.stores import client_of
from distwrap.supervision import channel as channel_module, notifier as notifier_module
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import Channel
from distwrap.supervision.failure import Failure
from distwrap.supervision.failure_news import FailureNews
from distwrap.supervision.hang_report import ask_all, last_seen
from distwrap.supervision.notifier import Notifier
from tests.slow import nightly

SECRET = 32 * b"s"
HUGE = str(10**12)


@contextmanager
def serving() -> Iterator[Any]:
    """The store of two ranks."""
    server = stores.serve("127.0.0.1", [0], "mine", 10)[0]
    store = PrefixStore("run", server)
    for rank in range(2):
        store.set(f"here/{rank}", json.dumps(identity()))
    yield store


@contextmanager
def meeting() -> Iterator[tuple[Any, list[Channel]]]:
    """The store, and the channels of two ranks that are on two nodes for the notifier, of which each serves a thing."""
    with serving() as store, pytest.MonkeyPatch.context() as patch:
        found = []
        for rank in range(2):
            patch.setattr(notifier_module, "node", lambda rank=rank: f"node {rank}")
            place = Placement(rank, 2, rank, 2, 0, 1, master_addr="127.0.0.1")
            each = Channel(Notifier(client_of(store), place), place, Activity(None), rank == 1, 600, SECRET)
            each.work.serve("thing", lambda request, waited: json.dumps(request).encode())
            found.append(each)
        yield store, found
        for each in found:
            each._halt()


@pytest.mark.parametrize(
    ("rank", "key", "value"),
    [
        (0, "here/1", "{}"),
        (0, "here/1", 100_000 * "["),
        (0, "asked/thing", HUGE),
        (1, "asked/thing", "junk"),
        *(
            nightly(*each, row="products", why="the other junk")
            for each in [(0, "here/1", "junk"), (1, "asked/thing", HUGE)]
        ),
    ],
)
@pytest.mark.slow("waits for a limit to pass")
def test_a_rank_ends_with_words(monkeypatch: pytest.MonkeyPatch, rank: int, key: str, value: str) -> None:
    """What it cannot read does not take its channel away, without which it would not hear of a failure.

    Rank 1 is one that a launcher on several nodes supervises.
    """
    words: list[str] = []

    monkeypatch.setattr(channel_module, "LAUNCHER_SECONDS", 0.1)
    with meeting() as (store, channels):

        def end(rank: int, why: str) -> None:
            words.append(why)
            channels[rank]._stopped.set()

        monkeypatch.setattr(channel_module, "end_process", end)
        store.set(key, value)
        channels[rank]._notifier.board.notify_all()
        channels[rank].start()
        channels[rank]._thread.join(10)
    assert words
    assert "another program writes to" in words[0]


def test_a_store_that_is_gone_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has lost a peer, and finds nobody who holds the store, says so, and not what torch says of it."""

    def read(texts: SignedTexts, key: str) -> str:
        raise dist.DistNetworkError("Broken pipe")

    with meeting() as (_, channels):
        monkeypatch.setattr(SignedTexts, "read", read)
        cause = channels[1].failures.wait_for_cause(1.0)
    assert cause is not None
    assert "does not answer (Broken pipe)" in cause.text


def test_a_rank_looks_without_a_ring_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was to ring may be gone: now and then a rank looks at a store elsewhere by itself."""
    with meeting() as (store, channels):
        channels[0].look()
        store.add("reports", 1)
        channels[0].look()
        assert not store.check(["report/1/0"])
        monkeypatch.setattr(channel_module, "LOOK_SECONDS", 0.0)
        channels[0].look()
        assert store.check(["report/1/0"])


@pytest.mark.parametrize("has_left", [True, False])
def test_a_neighbour_whose_process_is_gone(has_left: bool) -> None:
    """It has failed, unless it said before that it leaves."""
    stopped = threading.Event()
    stopped.set()
    with serving() as store:
        store.set("here/1", json.dumps({**identity(), "born": "another day"}))
        place, texts = Placement(0, 2, 0, 2, 0, 1, master_addr="127.0.0.1"), SignedTexts(store, SECRET)
        if has_left:
            texts.set("left/1", "")
        rings = Notifier(client_of(store), place)
        FailureNews(rings, texts, place, False, stopped).look()
        rings.close()
        told = texts.read("failure")
    assert (told is None) is has_left
    assert has_left or "died without raising an exception" in str(told)


def test_more_mailboxes_than_there_are_ranks() -> None:
    """A count that another program has written is no reason to ring for ever."""
    with meeting() as (store, channels):
        store.set("boxes", HUGE)
        channels[0].failures.tell(Failure.in_own_words(0, "it failed"))
        assert channels[1].failures.wait_for_cause(1.0).text == "it failed"  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["junk", "5", "{}", "[1, 2, 3]", f"[1{400 * '0'}, [1, 2]]", 100_000 * "["])
def test_the_report_outlives_junk(value: str) -> None:
    """It explains a failure, and must not fail itself."""
    with serving() as store:
        store.set("seen/0", value)
        assert last_seen(store, 0) == ""
        store.set("answers/1/all", "")
        store.set("report/1/0", value)
        store.set("report/1/1", json.dumps(["barrier", "train.py:8"]))
        assert re.match("  rank 0 .*\n  rank 1 in barrier at train.py:8$", ask_all(store, 2, notify=lambda: None))


@pytest.mark.slow("waits for a limit to pass")
def test_an_answer_of_before_is_none_to_a_new_question() -> None:
    """Whoever counts the questions back, and puts what was signed then into its place again, is not believed."""
    kept: dict[str, str] = {}
    found: list[bytes] = []
    write = SignedTexts.set

    def listen(texts: SignedTexts, key: str, text: str) -> None:
        write(texts, key, text)
        if key.startswith("work/") and len(found) == 0:
            kept[key] = texts._signed(key, text)

    with meeting() as (store, (served, asks)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SignedTexts, "set", listen)
        for request in ("old", "new"):
            for key, value in kept.items():
                store.set(key, value)
            asking = threading.Thread(target=lambda request=request: found.append(asks.work.ask("thing", 0, request)))
            asking.start()
            while asking.is_alive():
                asking.join(0.2)
                served.work.look()
            store.set("asked/thing", "0")
            assert store.get("asked/thing") == b"0"  # by now: to set waits for no answer, and others ask on their own
            served.work.look()
    assert found == [b'"old"', b'"new"']


def test_a_question_that_no_rank_has_asked() -> None:
    """Nobody else may change what a rank has asked for."""
    with meeting() as (store, (served, _)):
        store.add("asked/thing", 1)
        SignedTexts(store, b"").set("ask/thing/1", json.dumps(["other", "", 1, "token"]))
        served.work.look()
        assert not store.check(["work/thing/1/token"])


def test_a_text_stands_at_its_own_key_alone() -> None:
    """A signature tells where a name ends, and the text begins."""
    store = dist.HashStore()
    texts = SignedTexts(store, SECRET)
    texts.set("note/a", "b c")
    signed = store.get("note/a")[:64].decode()
    store.set("note/a b", f"{signed}c")
    assert texts.read("note/a b") is None
    assert texts.read("note/a") == "b c"


@pytest.mark.parametrize(
    ("key", "value"),
    [("secret/lacking", ""), ("secret/agreed", "no"), ("secret/agreed", "yes"), ("secret/offer", "none")],
)
@pytest.mark.slow("waits for a limit to pass")
def test_nobody_can_make_ranks_do_without_the_file_of_their_secret(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    """A run whose ranks have a file has a secret, or ends."""
    monkeypatch.setattr(secret, "of_file", lambda: 20 * b"a")
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    store.set(key, value)
    found: dict[int, Any] = {}

    def agree(rank: int) -> None:
        try:
            found[rank] = secret.agree_on_secret(store, Placement(rank, 2, 0, 1, 0, 1))
        except ArrivalError as error:
            found[rank] = str(error)

    ranks = [threading.Thread(target=agree, args=(rank,)) for rank in (1, 0)]
    for each in ranks:
        each.start()
        each.join(1)
    for each in ranks:
        each.join(20)
    for each in found.values():
        assert (isinstance(each, bytes) and each) or "must name the same secret on all ranks" in each
    assert len(found) == 2
