"""Side channel of many ranks on one store: bells, beside polling as it was before, in one run.

The store is a real one, in a process that does nothing else and stands for rank 0. The ranks are simulated: eight to a
node, spread over four processes, each rank with a connection and a channel of its own, whose thread's work is done for
all ranks of a process in turn, four times a second. What a rank looks at on its node costs the store nothing, and its
main thread is told to move or to stand still. Polling makes the calls that each rank made before: three a look.

    python benchmarks/control_plane.py [--quick] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from command_line import arguments, compare
from samples import Samples
from table import Row, report

from distwrap.environments import Placement
from distwrap.network import stores
from distwrap.supervision import failure_news, notifier, observer
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import TICK_SECONDS, Channel
from distwrap.supervision.failure import Failure
from distwrap.supervision.notifier import Notifier
from distwrap.supervision.waits import MainThread

PROCESSES = 4
A_NODE = 8
STILL_SECONDS = 0.5  # after which ranks count as stalled
LIMIT = 60.0  # seconds, after which news do not count as come


def main() -> None:
    args = arguments(__doc__)
    if args.against:
        compare(__file__, args)
        return
    rows, notes = [], []
    seconds = 0.5 if args.quick else 2.0 if args.short else 10.0
    for ranks in (64,) if args.short else (64, 512, 4096):
        ways = {way: measure(ranks, way, seconds) for way in ("bells", "polling")}
        ours, theirs = ways["bells"], ways["polling"]
        operations = [way["operations"] for way in ways.values()]
        rows += [
            Row(
                f"processor time of rank 0 a second, {ranks} ranks: bells, polling",
                Samples([ours["processor"]]),
                Samples([theirs["processor"]]),
                "ms",
                f"{operations[0]:.3g} and {operations[1]:.5g} operations a second",
                "<= 1 a second and node",
                operations[0] <= ranks / A_NODE,
            ),
            _news(f"failure news reach {ranks} ranks: bells, polling", ours["failure"], theirs["failure"], 2.0),
            _news(f"report that {ranks} ranks stand still: bells, polling", ours["stall"], theirs["stall"], 5.0),
        ]
        notes.append(f"{ranks} ranks: {ours['answers']} of them had answered in the report of the stall")
    report(f"control plane: simulated ranks in {PROCESSES} processes on one store", rows, notes, args)


def _news(what: str, ours: float, theirs: float, goal: float) -> Row:
    late = " (polling: not within the limit)" if theirs >= LIMIT else ""
    figure = f"{ours:.2g} s, {theirs:.2g} s{late}"
    return Row(what, Samples([ours]), Samples([theirs]), "s", figure, f"< {goal:g} s", ours < goal)


def measure(ranks: int, way: str, seconds: float) -> dict[str, float]:
    """Return the figures of ranks that stand by, hear of a failure, and stand still.

    Returns:
        Operations a second and processor seconds of the store's process a second, while nothing happens; seconds until
        the failure was heard by all; seconds until the report of the stall, and how many ranks answered in it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distwrap.supervision.channel"])
    server = _Process(context, hold_store)
    port = server.told()
    workers = []
    try:
        for number in range(PROCESSES):
            mine = range(ranks * number // PROCESSES, ranks * (number + 1) // PROCESSES)
            workers.append(_Process(context, simulate, port, ranks, mine, way))
        for worker in workers:
            worker.told()  # all ranks are there
        time.sleep(min(2.0, seconds))
        before, start = [server.ask("processor"), *(each.ask("operations") for each in workers)], time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - start
        after = [server.ask("processor"), *(each.ask("operations") for each in workers)]
        processor, *operations = [(b - a) / took for a, b in zip(before, after, strict=True)]
        began_failure = workers[0].ask("fail")
        heard = [worker.ask("heard") for worker in workers]
        began = time.time()
        for worker in workers:
            worker.ask("stand still")
        stall, answers = began + LIMIT, 0
        while time.time() < began + LIMIT and not answers:
            stall, answers = next(filter(None, [worker.ask("stall") for worker in workers]), (stall, 0))
            time.sleep(0.1)
        return {
            "processor": processor,
            "operations": sum(operations),
            "stall": stall - began,
            "answers": answers,
            "failure": min(LIMIT, max(heard) - began_failure),
        }
    finally:
        for process in [*workers, server]:
            process.end()


class _Process:
    """A process that answers questions."""

    def __init__(self, context: Any, body: Any, *args: Any) -> None:
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def say(self, what: str) -> None:
        self._conn.send(what)

    def told(self) -> Any:
        return self._conn.recv()

    def ask(self, what: str) -> Any:
        self.say(what)
        return self.told()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def hold_store(conn: Connection) -> None:
    """Hold the store, and tell this process's processor time."""
    _open_many_files()
    store, port = stores.serve("127.0.0.1", [0], stores.GIVEN, 300)
    conn.send(port)
    while conn.recv():
        conn.send(time.process_time())
    del store


def simulate(conn: Connection, port: int, ranks: int, mine: range, way: str) -> None:
    """Be some of the ranks, and do what the conversation asks for."""
    _open_many_files()
    store, _ = stores.connect("127.0.0.1", [port], stores.GIVEN, 300, "a rank")
    asked: Counter[str] = Counter()
    simulated = (_Ringing if way == "bells" else _Polling)(store, asked, ranks, mine)
    threading.Thread(target=simulated.run, daemon=True).start()
    conn.send("here")
    while what := conn.recv():
        if what == "operations":
            conn.send(asked.total())
        elif what == "stand still":
            simulated.moves = False
            conn.send(None)
        elif what == "stall":
            conn.send(simulated.stall)
        elif what == "fail":
            conn.send(time.time())
            simulated.fail()
        elif what == "heard":
            simulated.all_heard.wait(LIMIT)
            conn.send(max(simulated.heard.values()) if simulated.all_heard.is_set() else time.time() + LIMIT)


class _Counted:
    """Client of the store that counts what it is asked for."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        self._store, self._asked = store, asked

    def clone(self) -> _Counted:
        return _Counted(self._store.clone(), self._asked)

    def has_extended_api(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        self._asked[name] += 1
        return getattr(self._store, name)


class _Simulated:
    """Some ranks, whose looks are made in turn.

    Attributes:
        moves: whether their main threads move.
        heard: when each heard of the failure.
        stall: when a rank of these had the report of the stall, and how many ranks answered in it.
    """

    def __init__(self, store: Any, asked: Counter[str], ranks: int, mine: range) -> None:
        self.ranks, self.mine, self.moves = ranks, mine, True
        self.clients = {rank: _Counted(store.clone(), asked) for rank in mine}
        self.heard: dict[int, float] = {}
        self.all_heard = threading.Event()
        self.stall: tuple[float, int] | None = None

    def run(self) -> None:
        while True:
            start = time.monotonic()
            for rank in self.mine:
                self.look(rank)
            time.sleep(max(0.0, TICK_SECONDS - (time.monotonic() - start)))

    def look(self, rank: int) -> None:
        raise NotImplementedError

    def fail(self) -> None:
        raise NotImplementedError

    def hear(self, rank: int) -> None:
        """Note that a rank has heard of the failure."""
        self.heard.setdefault(rank, time.time())
        if len(self.heard) == len(self.mine):
            self.all_heard.set()

    def report(self, answers: int) -> None:
        """Note that the stall is reported."""
        self.stall = (time.time(), answers)


class _Ringing(_Simulated):
    """Ranks with channels of this distwrap."""

    def __init__(self, store: Any, asked: Counter[str], ranks: int, mine: range) -> None:
        super().__init__(store, asked, ranks, mine)
        failure_news.NEWS_SECONDS = observer.COLLECTIVE_SECONDS = 0.0
        failure_news.end_process = lambda rank, why: self.hear(rank)  # type: ignore[assignment,return-value]
        MainThread.look = lambda thread: self._look_at(thread)  # type: ignore[assignment,method-assign]
        here = json.dumps({"node": "simulated", "host": "simulated"})
        for rank in mine:
            store.set(f"here/{rank}", here)
        while not store.check([f"here/{rank}" for rank in range(ranks)]):
            time.sleep(0.1)
        self.channels = {}
        for rank in mine:
            node = rank // A_NODE
            notifier.node = lambda node=node: f"node {node}"  # type: ignore[assignment,misc]
            place = Placement(rank, ranks, rank % A_NODE, A_NODE, node, -(-ranks // A_NODE), "127.0.0.1", 1)
            rings = Notifier(self.clients[rank], place)  # type: ignore[arg-type]
            channel = Channel(rings, place, Activity(None), False, STILL_SECONDS, b"")  # type: ignore[arg-type]
            channel._report = self._reporting(channel)  # type: ignore[method-assign]
            channel.work.serve(f"alike/{rank}", lambda request, waited: b"")
            self.channels[rank] = channel

    def _look_at(self, thread: Any) -> bool:
        now, before = time.monotonic(), thread._looked
        thread.still, thread._looked = 0.0 if self.moves else thread.still + now - before, now
        return self.moves

    def look(self, rank: int) -> None:
        self.channels[rank].look()

    def fail(self) -> None:
        rank = self.mine[0]
        self.hear(rank)
        failure = Failure.in_own_words(rank, "it has failed")
        threading.Thread(target=self.channels[rank].failures.tell, args=(failure,), daemon=True).start()

    def _reporting(self, channel: Channel) -> Any:
        """Return what reports the stall in a thread of its own: the other ranks of this process must answer."""

        def ask() -> None:
            text = channel.reporter.ask_others()
            silent = 0 if "not answer" not in text else _number(text)
            self.report(self.ranks - silent)

        return lambda words: threading.Thread(target=ask, daemon=True).start()


class _Polling(_Simulated):
    """Ranks that look at the store as they did before."""

    def __init__(self, store: Any, asked: Counter[str], ranks: int, mine: range) -> None:
        super().__init__(store, asked, ranks, mine)
        self.still: set[int] = set()
        self.noted = dict.fromkeys(mine, 0.0)
        self.answered: set[int] = set()
        self.keys = [f"still/{rank}" for rank in range(ranks)]

    def look(self, rank: int) -> None:
        store = self.clients[rank]
        if store.check(["reports"]) and store.add("reports", 0) and rank not in self.answered:
            self.answered.add(rank)
            store.set(f"report/1/{rank}", json.dumps(["", "", None, ""]))
        if time.monotonic() - self.noted[rank] > max(1.0, self.ranks / 2):
            self.noted[rank] = time.monotonic()
            store.set(f"seen/{rank}", json.dumps(["", "", None, ""]))
        store.check([f"asked/alike/{rank}"])
        if store.check(["failure"]) and store.get("failure"):
            self.hear(rank)
        if not self.moves:
            self._stand_still(rank, store)

    def _stand_still(self, rank: int, store: Any) -> None:
        if rank not in self.still:
            self.still.add(rank)
            store.set(f"still/{rank}", "1")
        still = store.check(self.keys) and all(store.get(key) == b"1" for key in self.keys)
        if still and store.compare_set("stalled", "", str(rank)).decode() == str(rank):
            threading.Thread(target=self._ask, args=(store,), daemon=True).start()

    def _ask(self, store: Any) -> None:
        store.add("reports", 1)
        keys, deadline = [f"report/1/{rank}" for rank in range(self.ranks)], time.monotonic() + 1.5
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.report(sum(store.check([key]) for key in keys))

    def fail(self) -> None:
        self.clients[self.mine[0]].compare_set("failure", "", "it has failed")


def _number(text: str) -> int:
    """Return how many ranks a report says do not answer."""
    words = next(line for line in text.splitlines() if "not answer" in line).split(" do")[0]
    total = 0
    for part in words.replace("ranks", "").replace("rank", "").split(","):
        first, _, last = part.strip().partition("-")
        total += int(last or first) - int(first) + 1
    return total


def _open_many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
