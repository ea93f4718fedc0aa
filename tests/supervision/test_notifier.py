"""Ranks are notified of news, and leave the store alone where there is none."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.environments import Placement
from distwrap.environments.identity import node
from distwrap.launch import store_file
from distwrap.network import stores
from distwrap.network.stores import client_of
from distwrap.network.waiting import wait_until
from distwrap.supervision import notifier as notifier_module
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import TICK_SECONDS, Channel
from distwrap.supervision.notes import RankNotes, read_note
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.shared_status import SharedStatus
from tests.clock import FastClock
from tests.slow import nightly

LIMIT = 60.0


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        self._store, self._asked = store, asked

    def clone(self) -> Counting:
        return Counting(client_of(self._store), self._asked)

    def __getattr__(self, name: str) -> Any:
        self._asked[name] += 1
        return getattr(self._store, name)


def _serve() -> TCPStore:
    return stores.serve("127.0.0.1", [0], "mine", 10)[0]


def _clients(server: TCPStore, number: int) -> list[Any]:
    return [client_of(PrefixStore("run", server)) for _ in range(number)]


@pytest.fixture
def on_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TCPStore, str], list[Notifier]]]:
    """Makes the notifier of ranks, each on the node of its name."""
    made: list[Notifier] = []
    served: list[TCPStore] = []

    def make(server: TCPStore, names: str) -> list[Notifier]:
        served.append(server)  # which must live as long
        for rank, (client, name) in enumerate(zip(_clients(server, len(names)), names, strict=True)):
            monkeypatch.setattr(notifier_module, "node", lambda name=name: name)
            made.append(Notifier(client, Placement(rank, len(names), master_addr="127.0.0.1")))
        return made

    yield make
    while made:
        made.pop().close()
    served.clear()


def _sizes() -> list[int]:
    dw.barrier()
    time.sleep(0.6)  # for what the barrier and the first look have left
    loader = dw.shard_loader(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    sizes = []
    for _ in range(2):
        for _epoch in range(20):
            list(loader)
        dw.barrier()
        sizes.append(os.stat(os.environ.get("DISTWRAP_STORE", dw.placement().job)).st_size)
        time.sleep(2.5)
    dw.barrier()
    return sizes


@pytest.mark.parametrize(
    "launcher",
    ["forkserver", nightly("elastic", row="long", why="[forkserver]: the ranks of either meet in such a file")],
)
@pytest.mark.slow("waits for a limit to pass")
def test_the_store_of_one_node_does_not_grow(launcher: str) -> None:
    """While ranks go on and nobody asks anything, nothing is added to the file in which they met."""
    for before, after in dw.distributed(_sizes, nprocs=2, launcher=launcher, returns="all")():
        assert before == after


def test_a_quiet_rank_leaves_the_store_alone() -> None:
    """Ranks of one node look at the store when they start, say now and then where they are, and that is all."""
    server, clock = _serve(), FastClock()
    asked: Counter[str] = Counter()
    places = [Placement(rank, 4, rank, 4, master_addr="127.0.0.1") for rank in range(4)]
    for place in places:
        server.set(f"run/here/{place.rank}", '{"node": "another"}')
    rings = [
        Notifier(Counting(client, asked), place, clock)  # type: ignore[arg-type]
        for client, place in zip(_clients(server, 4), places, strict=True)
    ]
    channels = [Channel(each, place, Activity(None), False, 60, b"") for each, place in zip(rings, places, strict=True)]

    def look(seconds: float) -> None:
        for _ in range(int(seconds / TICK_SECONDS)):
            clock.sleep(TICK_SECONDS)
            for channel in channels:
                channel.look()

    look(5)
    asked.clear()
    look(20)
    quiet = asked.total()
    for channel in channels:
        channel.stop()
    assert 0 < quiet <= 4 * (20 / 4 + 1), asked  # each of four says once in four seconds where it is


def test_news_reach_other_nodes(on_nodes: Callable[[TCPStore, str], list[Notifier]]) -> None:
    """A ring is heard on the same node and on others, by all or by the one rank that it is for, and once."""
    ranks = on_nodes(_serve(), "aabb")
    ranks[0].notify_all()
    assert all(wait_until(rank.wakeups, 5) for rank in ranks)
    before = [rank.wakeups() for rank in ranks]
    ranks[0].notify(2)
    assert wait_until(lambda: ranks[2].wakeups() > before[2], 5)
    after = [rank.wakeups() for rank in ranks]
    assert after[:2] == before[:2]
    time.sleep(0.3)
    assert [rank.wakeups() for rank in ranks] == after


def test_the_mail_of_a_node_outlives_who_waits_for_it(on_nodes: Callable[[TCPStore, str], list[Notifier]]) -> None:
    """When the rank that waits for its node's mail leaves, another of the node does from then on."""
    elsewhere, first, second = on_nodes(_serve(), "abb")
    first.close()
    assert not first._waiter.is_alive()
    second.listen()
    heard = second.wakeups()
    elsewhere.notify(2)
    assert wait_until(lambda: second.wakeups() > heard, 5)


def test_a_ring_while_a_rank_looks_is_not_lost() -> None:
    """Whoever reads the bell takes the ring away before it looks, from whichever thread."""
    board = SharedStatus(ranks=2)
    assert board.take(1) == (False, False)
    board.notify(1)
    board.ask(0)
    assert (board.take(0), board.take(1), board.take(1)) == ((True, True), (True, False), (False, False))


def test_texts_are_read_whole() -> None:
    """A text that is replaced is read as it was or as it is; one that is too long is refused."""
    board = SharedStatus(ranks=3, texts=True)

    def write() -> None:
        for number in range(20_000):
            board.write(2, {"seen": [number] * (number % 50 + 1)})

    writer = get_context("fork").Process(target=write)
    writer.start()
    while writer.is_alive():
        assert len(set(board.read(2).get("seen", []))) <= 1
    writer.join(LIMIT)
    assert set(board.read(2)["seen"]) == {19_999}
    assert not board.write(1, {"long": "x" * 100_000})
    assert board.read(1) == {}


def test_a_text_that_was_written_over_while_it_was_read() -> None:
    """However often the writer came back meanwhile: what is half one text and half another is read again."""
    board = SharedStatus(texts=True)
    board.write(0, {"seen": [1, 2, 3]})
    memory = board._memory
    place = memory.find(b"1")
    memory[place : place + 1] = b"2"
    writer = threading.Timer(0.2, board.write, (0, {"seen": [4]}))
    writer.start()
    assert board.read(0) == {"seen": [4]}
    writer.join(LIMIT)


def test_a_board_that_is_full() -> None:
    """What a rank notes of many loaders leaves room for where it is, of which the store is to hold nothing."""
    with store_file.place() as path:
        store, here = PrefixStore("run", FileStore(path)), [1.0, ["barrier", "train.py:8"]]
        notifier, number = Notifier(store, Placement(0, 2)), 0
        notes = RankNotes(notifier, rank=0)
        while notes.write_on_board(f"note/{number}", "x"):
            number += 1
        size = os.stat(path).st_size
        notes.write("seen", here)
        assert os.stat(path).st_size == size
        assert read_note(store, "seen", 0) == here
        assert not notes.write_on_board("note/0", 5000 * "y")
        assert notes.read_on_board("note/0", 0) == (None, True), "what is no longer so"
        assert notes.erase_from_board("note/1")
        assert not notes.erase_from_board("note/1")
        assert notes.read_on_board("note/1", 0) == (None, True)
        notes.write("seen", 20_000 * "z")
        assert read_note(store, "seen", 0) == 20_000 * "z"
        notifier.close()
        del store, notifier, notes


class StopsBeforeTheByte:
    """Memory whose writer is killed before it says which of two texts is valid."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __getitem__(self, place: Any) -> Any:
        return self._memory[place]

    def __setitem__(self, place: Any, data: Any) -> None:
        if isinstance(place, int):
            raise KeyboardInterrupt
        self._memory[place] = data


def test_a_writer_that_is_killed_midway() -> None:
    """What it has said before stays, until what comes next is there whole."""
    board = SharedStatus(ranks=3, texts=True)
    board.write(2, {"seen": 1})
    memory, board._memory = board._memory, StopsBeforeTheByte(board._memory)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        board.write(2, {"seen": 2})
    board._memory = memory
    assert board.read(2) == {"seen": 1}


BOARD = "distwrap-board-0123"


@pytest.mark.parametrize(
    ("name", "said", "owner", "is_board"),
    [
        (BOARD, BOARD, os.geteuid(), True),
        ("of-another-program", "of-another-program", os.geteuid(), False),
        ("of-another-program", BOARD, os.geteuid(), False),
        pytest.param(BOARD, BOARD, 65534, False, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_no_memory_is_taken_for_a_board_that_is_none(name: str, said: str, owner: int, is_board: bool) -> None:
    """Whoever reaches the store may name any memory: only a board of the user's is opened, and grown to its size."""
    server = _serve()
    client = _clients(server, 1)[0]
    fd = os.memfd_create(name)
    os.fchown(fd, owner, -1)
    try:
        client.set(f"board/{node()}", json.dumps([1, f"/proc/{os.getpid()}/fd/{fd}", said]))
        client.set("boxes", "1")
        Notifier(client, Placement(1, 2, master_addr="127.0.0.1")).close()
        assert (os.fstat(fd).st_size > 0) is is_board
    finally:
        os.close(fd)


@pytest.mark.parametrize("held", [True, False])
def test_nothing_is_held_open_after_the_end(held: bool) -> None:
    """A board is given back when its rank leaves, and not when the collector of garbage comes."""
    gc.disable()
    try:
        with store_file.place() as path:
            before = len(os.listdir("/proc/self/fd"))
            for run in range(5):
                store = PrefixStore(str(run), FileStore(path) if held else HashStore())
                notifier = Notifier(store, Placement(0, 2))
                assert notifier.is_held == held
                notifier.close()
                del store, notifier
            assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
