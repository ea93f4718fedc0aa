"""The callers of a launch on several nodes: they meet, number their ranks, and tell each other of failures.

The caller on each node starts and watches its own ranks. The caller on node 0 holds the store in which the callers
meet, and the ranks too. Messages are JSON: nothing from another node is unpickled here, and an exception comes in its
own type where this process knows that type already.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Pipe
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.errors import ArrivalError, OptionError, WorkerDiedError, WorkerTraceback
from distwrap.launch.outcome import Outcome, raise_if_failed
from distwrap.launch.task import NodePlan
from distwrap.network import interfaces, keys, secret, stores
from distwrap.network.rendezvous import check_versions, registration, registrations, wait_for_all
from distwrap.network.signed_texts import SignedTexts
from distwrap.network.waiting import run_within
from distwrap.supervision.failure import Failure
from distwrap.wording import first_line, first_names, named_ranks

BEAT_SECONDS = 0.5
LOST_SECONDS = 30.0  # without a beat, after which a node counts as lost
SUSPECT_SECONDS = 2.0  # the same, once a rank has lost a peer
_LEAVE_SECONDS = 10.0  # for the others to leave before node 0 does
_NEWS_SECONDS = 3.0  # for the others to read of a failure


@dataclass(frozen=True)
class NodeSummary:
    """Result of a decorated call on every node but the one of rank 0.

    Attributes:
        node_rank: number of this node.
        ranks: the ranks that ran on this node.
        world_size: number of ranks on all nodes.
        host_of_rank_zero: host on which the function's value is.
        seconds: duration of the call.
    """

    node_rank: int
    ranks: tuple[int, ...]
    world_size: int
    host_of_rank_zero: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"node {self.node_rank}: {named_ranks(self.ranks)} of {self.world_size} done in {self.seconds:.1f} s; "
            f"the result is on {self.host_of_rank_zero}"
        )

    def __format__(self, spec: str) -> str:
        return str(self)  # so that print(f"{accuracy:.3f}") of the one script that all nodes run does not fail


class PeerLaunchers:
    """Connection of the caller on this node to the callers on the others.

    Args:
        plan: the nodes that take part.
        nprocs: number of ranks that this node starts.
        seconds: time limit for all nodes to arrive.

    Attributes:
        node_rank: number of this node.
        hosts: names of the nodes' hosts.
        ranks: the ranks on this node.
        world_size: number of ranks on all nodes.
        news: readable with an `Outcome` when a rank or a node elsewhere has failed, and with ``None`` when the ranks of
            all nodes are done.

    Raises:
        ArrivalError: not all nodes arrived, two have the same number, or they run different versions.
    """

    def __init__(self, plan: NodePlan, nprocs: int, seconds: float) -> None:
        self._host, self._port, self._size = str(plan.host), plan.port, plan.max_nodes
        self._began = time.monotonic()
        store, holds_it = self._open(plan.node_rank, seconds)
        self._store: Store = PrefixStore("nodes", store)
        self.node_rank = self._register(0 if holds_it else plan.node_rank, nprocs)
        callers = self._wait_for_all(seconds)
        self._counts = [caller["nprocs"] for caller in callers]
        self.hosts: list[str] = [caller["host"] for caller in callers]
        self.world_size = sum(self._counts)
        first = sum(self._counts[: self.node_rank])
        self.ranks = tuple(range(first, first + nprocs))
        given = b""
        with suppress(OptionError):  # of which this node's ranks tell all others
            given = secret.of_file()  # with which no two runs sign alike: node 0's registration has its process's birth
        self._texts = SignedTexts(self._store, given and secret.signature(self._store.get("here/0"), given))
        mine, zero = callers[self.node_rank], callers[0]
        try:
            check_versions(mine, f"node {self.node_rank} on {mine['host']}", zero, f"node 0 on {zero['host']}")
        except ArrivalError as error:
            self.tell(error)  # node 0 has nothing to complain of, and would go on
            raise
        self.news, self._pipe = Pipe(duplex=False)
        self._patience = LOST_SECONDS
        self._stopped = threading.Event()
        self._answered = time.monotonic()
        self._threads = [
            threading.Thread(target=work, name=f"distwrap-{work.__name__.strip('_')}", daemon=True)
            for work in (self._beat, self._watch_store)
        ]

    # Rendezvous

    def _open(self, node_rank: int | None, seconds: float) -> tuple[Store, bool]:
        """Hold the store on node 0, or reach it. Without a number, the first on the endpoint's host is node 0.

        Returns:
            The store, and whether this process holds it.
        """
        name = "this node" if node_rank is None else f"node {node_rank}"
        is_local = interfaces.is_local(self._host)
        if node_rank == 0 and not is_local:
            raise ArrivalError(
                f"node_rank=0 on {socket.gethostname()}, but rdzv_endpoint={self._host}:{self._port} is not this "
                f"node: the endpoint must name the host of node 0. {interfaces.ADVICE}"
            )
        taken = ""
        if node_rank == 0 or (node_rank is None and is_local):
            try:
                return stores.serve(None, [self._port], stores.GIVEN, seconds)[0], True
            except ArrivalError as error:  # another caller on this node has the port, or somebody else
                if node_rank == 0:
                    raise
                taken = f"{error} No caller of this run has it either: "
        while (left := seconds - (time.monotonic() - self._began)) > 0:
            try:
                store, _ = stores.connect(self._host, [self._port], stores.GIVEN, left, name)
            except ArrivalError as error:
                raise ArrivalError(f"{taken}{error}") from None
            if not store.check(["nodes/over"]):
                return store, False
            time.sleep(0.02)  # the store of the call before, which node 0 is about to close
        raise ArrivalError(
            f"{name} on {socket.gethostname()} found only the end of an earlier run at "
            f"{self._host}:{self._port} within {seconds:.0f} s. Is node 0 still running it, or has it "
            "finished? Start the same command on every node."
        )

    def _register(self, node_rank: int | None, nprocs: int) -> int:
        """Register under the given number, or under the first that is free; 0 is the node that holds the store."""
        mine = registration(None)
        text = json.dumps({**mine, "nprocs": nprocs})
        for number in [node_rank] if node_rank is not None else range(1, self._size):
            first = self._store.compare_set(f"here/{number}", "", text).decode()
            if first == text:
                return number
        if node_rank is None:
            raise ArrivalError(
                f"{mine['host']} is one node too many: all {self._size} nodes are here already. Give a larger "
                "nnodes=, or do not start it there."
            )
        other = json.loads(first)
        raise ArrivalError(
            f"there are two nodes with node_rank={node_rank}: {mine['host']} (this one, pid {mine['pid']}) and "
            f"{other['host']} (pid {other['pid']}), which came first. Give each its own number, or leave node_rank "
            f"out: the nodes then number themselves as they arrive."
        )

    def _wait_for_all(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for the callers on all nodes, and return their registrations."""

        def describe(hosts: dict[int, str]) -> str:
            missing = [number for number in range(self._size) if number not in hosts]
            here = f"{len(hosts)} of {self._size} nodes are here ({first_names([*hosts.values()], 16)})"
            return f"{here}; missing: node(s) {first_names(missing, 16)}"

        left = seconds - (time.monotonic() - self._began)
        where = f"{self._host}:{self._port}"
        late = wait_for_all(self._store, self.node_rank, self._size, left, where, describe, all_print=True)
        if late:
            name = f"node {self.node_rank} on {socket.gethostname()}"
            raise ArrivalError(f"{name} {late}. Start the same command on every node.")
        return registrations(self._store, range(self._size))

    # Assignments of the ranks on this node

    @property
    def place(self) -> str:
        """Address of the store, in the form that `distwrap_environment` reads."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp://{host}:{self._port}/{os.getpid()}"

    def placement(self, rank: int) -> Placement:
        """Return the placement of one of the ranks on this node."""
        here = self.ranks
        return Placement(
            rank=rank,
            world_size=self.world_size,
            local_rank=rank - here[0],
            local_world_size=len(here),
            node_rank=self.node_rank,
            nnodes=self._size,
            master_addr=self._host,
            master_port=self._port,
            source="distwrap",
        )

    def summary(self) -> NodeSummary:
        """Return what the call returns on this node in place of a value."""
        seconds = time.monotonic() - self._began
        return NodeSummary(self.node_rank, self.ranks, self.world_size, self.hosts[0], seconds)

    # Failures

    def start(self) -> None:
        """Begin to watch the other nodes. All ranks are started: a thread before would make forking unsafe."""
        for thread in self._threads:
            thread.start()

    def hurry(self) -> None:
        """Look sooner for a node that is gone: a rank has lost a peer."""
        self._patience = SUSPECT_SECONDS

    def tell(self, error: BaseException) -> None:
        """Tell the other nodes of a failure here; the first that is told is believed to be the cause."""
        texts, message = self._texts, self._failure(error).to_json()
        run_within(lambda: texts.set_first("failure", message), _NEWS_SECONDS)

    def _failure(self, error: BaseException) -> Failure:
        """Return an error that was raised here; the caller itself stands for its first rank."""
        rank, host = getattr(error, "rank", None), getattr(error, "host", None) or socket.gethostname()
        cause = error.__cause__ if isinstance(error.__cause__, WorkerTraceback) else WorkerTraceback("")
        first = self.ranks[0] if rank is None else rank
        return Failure.of(error, first, host=host, pid=0, traceback=cause.text, secondary=cause.secondary)

    def finish(self) -> None:
        """Wait until the ranks of all nodes are done, as those here are.

        Raises:
            BaseException: the exception of a rank elsewhere.
        """
        self._texts.set(f"done/{self.node_rank}", "")
        failed: Outcome | None = self.news.recv()
        if failed is not None:
            raise_if_failed([failed])

    def close(self) -> None:
        """Leave; node 0 last, since it holds the store."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * BEAT_SECONDS)
        store, is_zero, all_left = self._store, self.node_rank == 0, [f"bye/{number}" for number in range(self._size)]

        def leave() -> None:
            store.set("over", "")
            store.set(f"bye/{self.node_rank}", "")
            if is_zero:
                seconds = _NEWS_SECONDS if store.check(["failure"]) else _LEAVE_SECONDS
                store.wait(all_left, timedelta(seconds=seconds))

        run_within(leave, _NEWS_SECONDS + _LEAVE_SECONDS * is_zero)
        self.news.close()
        self._pipe.close()
        del self._store  # the port must be free before the traceback of a failure is gone

    def _beat(self) -> None:
        """Show the other nodes that this one lives, and read their news."""
        beats: dict[int, tuple[bytes, float]] = {}
        done = [f"done/{number}" for number in range(self._size)]
        store, texts = self._store, self._texts  # which it may outlive, where the network is gone
        while not self._stopped.is_set():
            try:
                store.set(f"beat/{self.node_rank}", str(time.monotonic()))
                if failure := texts.read("failure"):
                    self._report(Failure.from_json(failure))
                    return
                if store.check(done) and all(texts.read(key) is not None for key in done):
                    with suppress(OSError):
                        self._pipe.send(None)
                    return
                if self.node_rank == 0:
                    self._look_for_lost_nodes(beats)
            except (RuntimeError, ValueError) as error:  # it is gone, or another program writes there
                if not self._stopped.is_set():
                    self._report(self._failure(self._lost(0, f"its store does not answer ({first_line(error)})")))
                return
            self._answered = time.monotonic()
            self._stopped.wait(BEAT_SECONDS)

    def _watch_store(self) -> None:
        """Notice that the store has fallen silent, for which torch itself would wait."""
        while not self._stopped.wait(BEAT_SECONDS) and self._threads[0].is_alive():
            if time.monotonic() - self._answered > LOST_SECONDS:
                self._report(self._failure(self._lost(0, f"its store has not answered for {LOST_SECONDS:g} s")))
                return

    def _look_for_lost_nodes(self, beats: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for number in range(1, self._size):
            beat = keys.read(self._store, f"beat/{number}")
            if number not in beats or beats[number][0] != beat:
                beats[number] = (beat, now)
            silent = now - beats[number][1]
            if silent > self._patience and not self._store.check([f"done/{number}"]):
                self.tell(self._lost(number, f"its caller has given no sign of life for {silent:.1f} s"))

    def _lost(self, number: int, why: str) -> WorkerDiedError:
        host, rank = self.hosts[number], sum(self._counts[:number])
        text = f"node {number} ({host}) is gone: {why}. The node, its network, or the command on it has ended."
        return WorkerDiedError(text, rank=rank, host=host)

    def _report(self, failure: Failure) -> None:
        """Let whoever reads `news` know of a failure."""
        with suppress(OSError):
            self._pipe.send(Outcome(failure.rank, failure=failure))
