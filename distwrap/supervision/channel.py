"""The side channel: what ranks tell each other besides collectives, on a store client and a thread of their own.

A thread a rank looks at the store four times a second. It answers who asks where the rank is, notices when no rank
moves any more, and, where no launcher of ours watches (torchrun, srun), reads that another rank has failed, and ends
this one, which would else wait in a collective. It never joins a collective.

Messages are JSON: nothing that comes over the store is unpickled here.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap._internals.python import multiprocessing_settings
from distwrap.environments import Placement
from distwrap.environments.identity import lives, node
from distwrap.errors import CollectiveError, WorkerDiedError
from distwrap.supervision import hang_report, stacks
from distwrap.supervision.activity import Activity
from distwrap.supervision.stacks import Location
from distwrap.supervision.stall_detection import StallDetector
from distwrap.wording import first_line

TICK_SECONDS = 0.25
NEWS_SECONDS = 1.0  # for a rank to end by itself once another has failed
COLLECTIVE_SECONDS = 1.0  # after the time limit, for a collective to say itself that it has timed out
SILENT_SECONDS = 120.0  # without a beat, after which a working rank on another machine counts as gone


class Failure(NamedTuple):
    """What a rank tells of its end."""

    rank: int
    host: str
    pid: int
    summary: str
    traceback: str
    time: float

    def __str__(self) -> str:
        process = f" (pid {self.pid})" if self.pid else ""
        return f"rank {self.rank} on {self.host}{process}: {self.summary}"


class Channel:
    """This rank's end.

    Args:
        store: a client of its own.
        supervised: whether a launcher of ours waits for the ranks' processes, and tells of their ends.
        timeout: seconds without any rank moving after which the run counts as stalled.

    Attributes:
        on_stall: called with the report on the rank that finds the run stalled; ends the process by default.
    """

    def __init__(self, store: Store, placement: Placement, crumbs: Activity, supervised: bool, timeout: float):
        self._store = store
        self._place = placement
        self._crumbs = crumbs
        self.supervised = supervised
        self._timeout = timeout
        self._stopped = threading.Event()
        self._excuses = 0  # how many waits are under way that may take as long as they like
        self._failed_at: list[stacks.Line] | None = None
        self._answered = hang_report.count(store, "reports")
        self._agent = os.getppid() if supervised or "TORCHELASTIC_RUN_ID" in os.environ else None
        self._served: list[tuple[str, Callable[[], bytes]]] = []
        self._given: Counter[str] = Counter()
        self._neighbour = self._find_neighbour()
        self._watch = StallDetector()
        self._thread = threading.Thread(target=self._run, name="distwrap-channel", daemon=True)
        self.on_stall: Callable[[str], None] = self._leave_stalled

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye, and end the thread."""
        self._stopped.set()
        with contextlib.suppress(dist.DistError, RuntimeError):
            for name, make in self._served:
                self.publish(f"{name}/last", make())
            self._store.set(f"left/{self._place.rank}", "")
        if self._thread.is_alive():
            self._thread.join(2 * hang_report.ANSWER_SECONDS)

    # Failures

    def tell_failure(self, summary: str, traceback: str) -> None:
        """Let the other ranks know that this one has failed; the first to do so is believed to be the cause."""
        mine = Failure(self._place.rank, socket.gethostname(), os.getpid(), summary, traceback, time.time())
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.compare_set("failure", "", json.dumps(mine))

    def failure(self) -> Failure | None:
        """Return the first failure of any rank."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self._store.check(["failure"]):
                return Failure(*json.loads(self._store.get("failure")))
        return None

    def another_failure(self, seconds: float) -> Failure | None:
        """Wait a moment for the word of another rank that failed first, or for a neighbour to be found dead."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._look_after_neighbour()
            except dist.DistError as error:
                return self._store_is_gone(error)
            failure = self.failure()
            if failure is not None:
                return failure if failure.rank != self._place.rank else None
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    # Where everybody is

    def failed_at(self, lines: list[stacks.Line]) -> None:
        """From now on this rank is where it failed, whatever it does to report it."""
        self._failed_at = lines

    def where_all_are(self) -> str:
        """Ask all ranks where they are, and return it in lines, equal ones together."""
        return hang_report.where_all_are(self._store, self._place.world_size)

    def position(self) -> Location:
        """Say where this rank is."""
        lines = self._failed_at if self._failed_at is not None else stacks.of_thread(stacks.main_thread())
        what, where = stacks.locate(lines)
        return Location(what, where, self._crumbs.step, str(self._crumbs))

    # Notes that nobody waits for

    def note(self, key: str, text: str) -> None:
        """Leave a text for whoever looks; a failing store is told elsewhere."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.set(f"note/{key}", text)

    def noted(self, key: str) -> str:
        """Return what was left there; empty where nothing was."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self._store.check([f"note/{key}"]):
                return self._store.get(f"note/{key}").decode()
        return ""

    # Work of one rank for which others wait

    def excuse(self, on: bool) -> None:
        """From now on, or no longer, this rank may stand still without being stalled."""
        self._excuses += 1 if on else -1

    def publish(self, key: str, data: bytes) -> None:
        """Give others what they `wait_for`."""
        self._store.set(f"work/{key}", data.hex())  # torch's stores take text

    def wait_for(self, key: str, worker: int) -> bytes:
        """Wait for what another rank publishes: as long as it takes, while that rank lives.

        Raises:
            WorkerDiedError: it died.
            CollectiveError: it left the function without.
        """
        return self._awaited(lambda: f"work/{key}" if self._store.check([f"work/{key}"]) else "", worker)

    def serve(self, name: str, make: Callable[[], bytes]) -> None:
        """From now on give other ranks what they `ask` for; made in the channel's thread, within a quarter second."""
        self._served.append((name, make))

    def ask(self, name: str, worker: int) -> bytes:
        """Return what another rank serves by that name at this moment, whatever it does meanwhile, or served last.

        Raises:
            WorkerDiedError: it died.
        """
        number, last = self._store.add(f"asked/{name}", 1), f"work/{name}/last"

        def latest() -> str:
            answered = hang_report.count(self._store, f"answered/{name}")
            if answered >= number:
                return f"work/{name}/{answered}"
            return last if self._store.check([last]) else ""

        return self._awaited(latest, worker)

    def _awaited(self, where: Callable[[], str], worker: int) -> bytes:
        """Return what a rank has put into the store, once `where` names its key."""
        self.excuse(True)
        try:
            self._wait_until(where, worker)
            return bytes.fromhex(self._store.get(where()).decode())
        except dist.DistNetworkError as error:
            gone = self._store_is_gone(error)
            raise WorkerDiedError(f"rank {self._place.rank} waits for the work of rank {worker}, but {gone}") from None
        finally:
            self.excuse(False)

    def _wait_until(self, is_there: Callable[[], object], worker: int) -> None:
        left = f"left/{worker}"
        home = json.loads(self._store.get(f"here/{worker}"))
        pause, beat, beaten = 0.0005, b"", time.monotonic()
        while not is_there():
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            if self._store.check([left]) and not is_there():
                raise CollectiveError(
                    f"rank {self._place.rank} waits for the work of rank {worker}, which has left the function "
                    f"already. Every rank must make the same calls, in the same order."
                )
            if self.supervised:
                continue  # whoever started the ranks ends them all when one dies
            if home["node"] == node():
                gone = not lives(home)
            else:
                now = self._store.get(f"seen/{worker}") if self._store.check([f"seen/{worker}"]) else b""
                if now != beat:
                    beat, beaten = now, time.monotonic()
                gone = time.monotonic() - beaten > SILENT_SECONDS
            if gone:
                raise WorkerDiedError(
                    f"rank {self._place.rank} waits for the work of rank {worker} on {home['host']} "
                    f"(pid {home['pid']}), which is gone. Look at what it printed last.",
                    rank=worker,
                    host=home["host"],
                )

    # The thread

    def _run(self) -> None:
        published = 0.0
        # On one machine the store is a log that only grows, so who has many ranks tells less often.
        interval = max(1.0, self._place.world_size / 2)
        while not self._stopped.wait(TICK_SECONDS):
            try:
                self._look_after_parents()
                self._answer()
                self._give()
                if not self.supervised:
                    self._look_after_neighbour()
                    self._heed_failure()
                now = time.monotonic()
                if now - published > interval:
                    published = now
                    self._store.set(f"seen/{self._place.rank}", json.dumps((time.time(), self.position())))
                self._look_for_stall()
            except RuntimeError as error:
                if self.supervised or self._stopped.wait(NEWS_SECONDS):
                    return
                self._leave(str(self._store_is_gone(error)))

    def _answer(self) -> None:
        asked = hang_report.count(self._store, "reports")
        if asked > self._answered:
            self._answered = asked
            self._store.set(f"report/{asked}/{self._place.rank}", json.dumps(self.position()))

    def _give(self) -> None:
        for name, make in list(self._served):
            asked = hang_report.count(self._store, f"asked/{name}")
            if asked > self._given[name]:
                self.publish(f"{name}/{asked}", make())
                self._store.add(f"answered/{name}", asked - self._given[name])
                self._given[name] = asked

    def _look_after_parents(self) -> None:
        if self._agent is not None and os.getppid() != self._agent:
            self._leave("whoever started it is gone")  # on Linux the kernel has killed a rank of ours by then

    def _find_neighbour(self) -> tuple[int, dict[str, Any]] | None:
        """The next rank of this machine: each looks after one, so that together they look after all."""
        place = self._place
        if self.supervised or place.local_world_size == 1:
            return None
        first = place.rank - place.local_rank
        rank = first + (place.local_rank + 1) % place.local_world_size
        if rank >= place.world_size:
            return None
        home = json.loads(self._store.get(f"here/{rank}"))
        return (rank, home) if home["node"] == node() else None

    def _look_after_neighbour(self) -> None:
        if self._neighbour is None:
            return
        rank, home = self._neighbour
        if lives(home) or self._store.check([f"left/{rank}"]):
            return
        last = hang_report.last_seen(self._store, rank)
        summary = f"its process ended without a word{last}"
        news = Failure(rank, home["host"], home["pid"], summary, "", time.time())
        self._store.compare_set("failure", "", json.dumps(news))

    def _heed_failure(self) -> None:
        failure = self.failure()
        if failure is None or failure.rank == self._place.rank or self._stopped.wait(NEWS_SECONDS):
            return
        told = failure.traceback if self._place.local_rank == 0 and failure.host != socket.gethostname() else ""
        self._leave(f"{failure}{chr(10) if told else ''}{told.rstrip()}")

    def _store_is_gone(self, error: Exception) -> Failure:
        """Say so: it lives in the process of rank 0, or of its launcher."""
        summary = f"it, or its launcher, is gone: the store that it holds does not answer ({first_line(error)})"
        return Failure(0, str(self._place.master_addr), 0, summary, "", time.time())

    def _look_for_stall(self) -> None:
        key = f"still/{self._place.rank}"
        moved, still = self._watch.look()
        if moved or self._excuses:
            self._watch.still_since = time.monotonic()
            if self._watch.told:
                self._watch.told = False
                self._store.set(key, "")
            return
        if still < self._timeout + COLLECTIVE_SECONDS:
            return
        if not self._watch.told:
            self._watch.told = True
            self._store.set(key, "1")
        keys = [f"still/{rank}" for rank in range(self._place.world_size)]
        if not self._store.check(keys) or any(self._store.get(key) != b"1" for key in keys):
            return
        me = str(self._place.rank)
        if self._store.compare_set("stalled", "", me).decode() == me:
            self.on_stall(f"no rank has moved for {self._timeout:g} s:\n{self._where_still()}")

    def _where_still(self) -> str:
        # This thread itself answers for this rank, and is busy asking.
        self._answered = self._store.add("reports", 0) + 1
        asked = self._store.add("reports", 1)
        self._store.set(f"report/{asked}/{self._place.rank}", json.dumps(self.position()))
        return hang_report.answers(self._store, asked, self._place.world_size)

    def _leave_stalled(self, report: str) -> None:
        self.tell_failure(report, "")
        self._leave(report)

    def _leave(self, why: str) -> NoReturn:
        print(f"distwrap: rank {self._place.rank} ends, because {why}", file=sys.stderr, flush=True)
        for child in multiprocessing.active_children():  # loader workers
            child.kill()
        folder = multiprocessing_settings().get("tempdir")
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
