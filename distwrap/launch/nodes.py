"""The callers of a launch on several machines: they meet, number their ranks, and tell each other of failures.

Each machine's caller starts and watches its own ranks. Node 0's caller holds the store in which the callers meet, and
the ranks too. Messages are JSON: nothing from another machine is unpickled here; an exception comes in its own type
where this process knows that type already.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Pipe
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.errors import ArrivalError, WorkerDiedError
from distwrap.group.failures import in_words
from distwrap.launch import exception_json, transport
from distwrap.launch.node_plan import NodePlan
from distwrap.launch.transport import Outcome
from distwrap.network import interfaces, stores
from distwrap.network.rendezvous import compare, registration
from distwrap.wording import first_line

BEAT_SECONDS = 0.5
LOST_SECONDS = 30.0  # without a sign of life, after which a machine counts as lost
SUSPECT_SECONDS = 2.0  # the same, once a rank has lost a peer
_LEAVE_SECONDS = 10.0  # for the others to leave before node 0 does
_NEWS_SECONDS = 3.0  # for the others to read of a failure


@dataclass(frozen=True)
class NodeSummary:
    """What a decorated call returns on every machine but the one of rank 0.

    Attributes:
        node_rank: which machine this is.
        ranks: those that ran here.
        world_size: how many there were in all.
        host_of_rank_zero: where the function's value is.
        seconds: how long it took.
    """

    node_rank: int
    ranks: tuple[int, ...]
    world_size: int
    host_of_rank_zero: str
    seconds: float

    def __str__(self) -> str:
        ranks = f"{self.ranks[0]}-{self.ranks[-1]}" if len(self.ranks) > 1 else f"{self.ranks[0]}"
        return (
            f"node {self.node_rank}: rank(s) {ranks} of {self.world_size} done in {self.seconds:.1f} s; "
            f"the result is on {self.host_of_rank_zero}"
        )

    def __format__(self, spec: str) -> str:
        return str(self)  # so that print(f"{accuracy:.3f}") of the one script that all machines run does not fail


class Nodes:
    """This machine's end of the callers' meeting.

    Args:
        machines: which take part.
        nprocs: how many ranks this one starts.
        seconds: for all machines to come.

    Attributes:
        node_rank: which machine this is.
        counts: how many ranks each machine has.
        hosts: the machines' names.
        news: readable when a rank, or a machine, elsewhere has failed; carries an `Outcome`.

    Raises:
        ArrivalError: not all came, two say that they are the same one, or they run different versions.
    """

    def __init__(self, machines: NodePlan, nprocs: int, seconds: float) -> None:
        assert machines.host is not None
        self._host, self._port, self._size = machines.host, machines.port, machines.max_nodes
        self._began = time.monotonic()
        store, holds_it = self._open(machines, seconds)
        self._store: Store = PrefixStore("nodes", store)
        self.node_rank = self._register(0 if holds_it else machines.node_rank, nprocs)
        self.counts, self.hosts = self._wait_for_all(seconds)
        self.news, self._pipe = Pipe(duplex=False)
        self._patience = LOST_SECONDS
        self._stopped = threading.Event()
        self._all_done = threading.Event()
        self._alive = time.monotonic()
        self._threads = [
            threading.Thread(target=work, name=f"distwrap-{work.__name__.strip('_')}", daemon=True)
            for work in (self._beat, self._watch)
        ]

    # Meeting

    def _open(self, machines: NodePlan, seconds: float) -> tuple[Store, bool]:
        """Hold the store on node 0, which without a number is the first that comes on the endpoint's machine.

        Returns:
            The store, and whether this process holds it.
        """
        who = "this machine" if machines.node_rank is None else f"node {machines.node_rank}"
        local = interfaces.is_local(self._host)
        if machines.node_rank == 0 and not local:
            raise ArrivalError(
                f"node_rank=0 on {socket.gethostname()}, but rdzv_endpoint={self._host}:{self._port} is not this "
                f"machine: node 0 is the one that the endpoint names. {interfaces.ADVICE}"
            )
        taken = ""
        if machines.node_rank == 0 or (machines.node_rank is None and local):
            try:
                return stores.serve(None, [self._port], stores.GIVEN, seconds)[0], True
            except ArrivalError as error:  # by another caller on this machine, or by somebody else
                if machines.node_rank == 0:
                    raise
                taken = f"{error} No caller of this run has it either: "
        while (left := seconds - (time.monotonic() - self._began)) > 0:
            try:
                store, _ = stores.connect(self._host, [self._port], stores.GIVEN, left, who)
            except ArrivalError as error:
                raise ArrivalError(f"{taken}{error}") from None
            if not store.check(["nodes/over"]):
                return store, False
            time.sleep(0.02)  # the store of the call before, which node 0 is about to close
        raise ArrivalError(
            f"{who} on {socket.gethostname()} found only the end of an earlier run at {self._host}:{self._port} within "
            f"{seconds:.0f} s. Is node 0 still at it, or done? Start the same command on every machine."
        )

    def _register(self, node_rank: int | None, nprocs: int) -> int:
        """Say who we are under our number, or under the first that is free; 0 is who holds the store."""
        mine = registration(None)
        text = json.dumps({**mine, "nprocs": nprocs})
        for number in [node_rank] if node_rank is not None else range(1, self._size):
            first = self._store.compare_set(f"here/{number}", "", text).decode()
            if first == text:
                return number
        if node_rank is None:
            raise ArrivalError(f"{mine['host']} is one machine too many: all {self._size} are here already.")
        other = json.loads(first)
        raise ArrivalError(
            f"there are two machines with node_rank={node_rank}: {mine['host']} (this one, pid {mine['pid']}) and "
            f"{other['host']} (pid {other['pid']}), which came first. Give each its own number, or leave node_rank "
            f"out: they count off as they come."
        )

    def _wait_for_all(self, seconds: float) -> tuple[list[int], list[str]]:
        keys = [f"here/{number}" for number in range(self._size)]
        noticed = False
        while not self._store.check(keys):
            waited = time.monotonic() - self._began
            gave_up = self._store.check(["gave up"])
            if gave_up or (waited > min(stores.NOTICE_SECONDS, seconds) and not noticed):
                noticed = True
                here = {
                    n: json.loads(self._store.get(key))["host"]
                    for n, key in enumerate(keys)
                    if self._store.check([key])
                }
                missing = ", ".join(str(n) for n in range(self._size) if n not in here)
                report = (
                    f"{len(here)} of {self._size} machines are here ({', '.join(here.values())}); missing: node(s) "
                    f"{missing}"
                )
                if not gave_up and waited <= seconds:
                    print(f"distwrap: after {waited:.0f} s {report}", file=sys.stderr, flush=True)
            if gave_up or waited > seconds:
                if not gave_up:
                    self._store.set("gave up", "")
                if self.node_rank == 0:
                    time.sleep(1.5)  # it holds the store, in which the others are to read this
                raise ArrivalError(
                    f"node {self.node_rank} on {socket.gethostname()} waited {waited:.0f} s at "
                    f"{self._host}:{self._port}: {report}. Start the same command on every machine."
                )
            time.sleep(0.05)
        came = [json.loads(self._store.get(key)) for key in keys]
        mine = came[self.node_rank]
        try:
            compare(mine, f"node {self.node_rank} on {mine['host']}", came[0], f"node 0 on {came[0]['host']}")
        except ArrivalError as error:
            self.tell(error)  # node 0 has nothing to complain of, and would go on
            raise
        return [said["nprocs"] for said in came], [said["host"] for said in came]

    # What the ranks here are told

    @property
    def world_size(self) -> int:
        """How many ranks there are on all machines."""
        return sum(self.counts)

    @property
    def first(self) -> int:
        """The lowest rank here."""
        return sum(self.counts[: self.node_rank])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that run here."""
        return tuple(range(self.first, self.first + self.counts[self.node_rank]))

    @property
    def place(self) -> str:
        """Where the ranks meet, for `distwrap.placement.own`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp://{host}:{self._port}/{os.getpid()}"

    def placement(self, rank: int) -> Placement:
        """Place one of the ranks here."""
        local = self.counts[self.node_rank]
        return Placement(
            rank,
            self.world_size,
            rank - self.first,
            local,
            self.node_rank,
            self._size,
            self._host,
            self._port,
            "distwrap",
        )

    def summary(self) -> NodeSummary:
        """Say in place of a value how it went here."""
        seconds = time.monotonic() - self._began
        return NodeSummary(self.node_rank, self.ranks, self.world_size, self.hosts[0], seconds)

    # Failures

    def start(self) -> None:
        """Begin to watch the others. All ranks are started: a thread before would make forking unsafe."""
        for thread in self._threads:
            thread.start()

    def hurry(self) -> None:
        """A rank has lost a peer: look sooner for a machine that is gone."""
        self._patience = SUSPECT_SECONDS

    def tell(self, error: BaseException) -> None:
        """Let the other machines know of a failure here; the first is believed to be the cause."""
        told = {**exception_json.to_json(error), "node": self.node_rank}
        with suppress(dist.DistError, RuntimeError):
            self._store.compare_set("failure", "", json.dumps(told))

    def finish(self) -> None:
        """The ranks here are done: wait until those of all machines are.

        Raises:
            BaseException: what a rank elsewhere has raised.
        """
        self._store.set(f"done/{self.node_rank}", "")
        while not self._all_done.wait(0.05):
            if self.news.poll():
                outcome: Outcome = self.news.recv()
                assert outcome.error is not None
                raise transport.unpack_result(outcome.error)

    def close(self) -> None:
        """Leave; node 0 last, since it holds the store."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * BEAT_SECONDS)
        with suppress(dist.DistError, RuntimeError):
            self._store.set("over", "")
            self._store.set(f"bye/{self.node_rank}", "")
            if self.node_rank == 0:
                seconds = _NEWS_SECONDS if self._store.check(["failure"]) else _LEAVE_SECONDS
                self._store.wait([f"bye/{number}" for number in range(self._size)], timedelta(seconds=seconds))
        self.news.close()
        self._pipe.close()
        del self._store  # who holds it must not hold its port until the traceback of a failure is gone

    def _beat(self) -> None:
        """Show the others that we live, and read what they tell."""
        beats: dict[int, tuple[bytes, float]] = {}
        done = [f"done/{number}" for number in range(self._size)]
        turn = 0
        while not self._stopped.is_set():
            turn += 1
            try:
                self._store.set(f"beat/{self.node_rank}", str(turn))
                if self._store.check(["failure"]):
                    self._pass_on(json.loads(self._store.get("failure")))
                    return
                if self._store.check(done):
                    self._all_done.set()
                elif self.node_rank == 0:
                    self._look_for_the_lost(beats)
            except (dist.DistError, RuntimeError) as error:
                if not self._stopped.is_set():
                    self._pass_on(self._lost(0, f"its store does not answer ({first_line(error)})"))
                return
            self._alive = time.monotonic()
            self._stopped.wait(BEAT_SECONDS)

    def _watch(self) -> None:
        """Notice that the store has fallen silent, for which torch itself would wait."""
        while not self._stopped.wait(BEAT_SECONDS) and self._threads[0].is_alive():
            if time.monotonic() - self._alive > LOST_SECONDS:
                self._pass_on(self._lost(0, f"its store has not answered for {LOST_SECONDS:g} s"))
                return

    def _look_for_the_lost(self, beats: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for number in range(1, self._size):
            key = f"beat/{number}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if number not in beats or beats[number][0] != beat:
                beats[number] = (beat, now)
            silent = now - beats[number][1]
            if silent > self._patience and not self._store.check([f"done/{number}"]):
                lost = self._lost(number, f"its caller has given no sign of life for {silent:.1f} s")
                self._store.compare_set("failure", "", json.dumps(lost))

    def _lost(self, number: int, why: str) -> dict[str, Any]:
        host, rank = self.hosts[number], sum(self.counts[:number])
        text = f"node {number} ({host}) is gone: {why}. It, its network, or the command on it has ended."
        return {**exception_json.to_json(WorkerDiedError(text, rank=rank, host=host)), "node": number}

    def _pass_on(self, told: dict[str, Any]) -> None:
        if told["node"] == self.node_rank:
            return
        rank = told["rank"] if told["rank"] is not None else sum(self.counts[: told["node"]])
        error = exception_json.from_json(told)
        packed, words, trace = transport.pack_error(error), in_words(error), told["traceback"].strip()
        with suppress(OSError):
            self._pipe.send(Outcome(rank, told["host"], 0, told["time"], None, packed, words, trace))
