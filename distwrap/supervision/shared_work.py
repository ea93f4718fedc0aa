"""Work of one rank for which others wait: as long as it takes, while that rank lives, and never longer."""

import json
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch.distributed as dist

from distwrap import tracebacks
from distwrap.environments import Placement
from distwrap.environments.identity import lives, node
from distwrap.errors import CollectiveError, WorkerDiedError, WorkerError
from distwrap.network import memory_file
from distwrap.network.keys import count, read
from distwrap.network.signed_texts import SignedTexts
from distwrap.supervision.activity import Activity
from distwrap.supervision.failure_news import store_is_gone
from distwrap.supervision.notifier import Notifier

_MADE, _FAILED = b"+", b"-"  # before an answer, and before a traceback

# Takes what a rank asked, or None as this one leaves, and for how many seconds it waits; returns None for "not yet".
Make = Callable[[Any, float], bytes | None]

LOOK_SECONDS = 10.0  # between looks at the store without a wake-up
_MOST_QUESTIONS = 100_000  # between two looks: a rank waits for its answer before it asks again
SILENT_SECONDS = 120.0  # without a note, after which a working rank on another node counts as gone


class SharedWork:
    """Work that this rank gives to others, and its waits for theirs.

    Args:
        notifier: of the ranks.
        texts: by which to know what its ranks have written.
        placement: this rank's place.
        activity: told of waits, which may take as long as they like.
        supervised: whether a launcher of ours ends all ranks when one dies.
    """

    def __init__(
        self, notifier: Notifier, texts: SignedTexts, placement: Placement, activity: Activity, supervised: bool
    ) -> None:
        self._notifier, self._store, self._texts = notifier, notifier.store, texts
        self._place, self._activity, self._supervised = placement, activity, supervised
        # The store of ranks on one node is a file, and keeps what is deleted in it.
        self._store_is_file = placement.master_addr is None
        self._served: list[tuple[str, Make]] = []
        self._seen: Counter[str] = Counter()
        self._open: list[tuple[str, Make, float]] = []
        self._awaited: set[int] = set()  # ranks that this one has waited for

    def publish(self, key: str, data: bytes) -> None:
        """Publish the bytes for which other ranks call `wait_for`."""
        self._publish(key, data)
        self._notifier.notify_all()

    def _publish(self, key: str, data: bytes) -> None:
        self._texts.set(f"work/{key}", data.hex())  # torch's stores take text

    def wait_for(self, key: str, worker: int) -> bytes:
        """Wait for the bytes that another rank publishes: as long as it takes, while that rank lives.

        Raises:
            WorkerDiedError: that rank died.
            WorkerError: that rank failed.
            CollectiveError: that rank left the function without publishing them.
        """
        return self._wait((f"work/{key}",), worker)

    def serve(self, name: str, make: Make) -> None:
        """Answer the other ranks' calls of `ask` from now on, in the channel's thread, within a quarter of a second.

        An exception of `make` is raised on the rank that asks, and this one goes on.
        """
        self._served.append((name, _with_failures(make)))
        self._notifier.board.notify(self._place.rank)  # another rank may have asked before

    def ask(self, name: str, worker: int, request: Any = 0) -> bytes:
        """Return what another rank serves under a name, whatever else that rank does; or what it served last.

        The answer does not stay in the store: it comes in a file, where the store is one on Linux, or is deleted.

        Args:
            name: by which it is served.
            worker: the rank that serves it.
            request: for its `make`, as JSON has it.

        Raises:
            WorkerDiedError: that rank died.
            WorkerError: that rank could not make the answer; shows its traceback.
        """
        question = f"{name}/{self._store.add(f'asked/{name}', 1)}"
        token = secrets.token_hex(8)  # so that no answer of before, whose number comes again, is one to this question
        answer, last = f"work/{question}/{token}", f"work/{name}/last"
        with tempfile.TemporaryFile() as file:
            path = memory_file.path_of(file.fileno()) if self._store_is_file else ""
            self._texts.set(f"ask/{question}", json.dumps([request, path, self._place.rank, token]))
            self._notifier.notify(worker)
            data = self._wait((answer, last), worker)
            for key in (f"ask/{question}", answer):
                self._store.delete_key(key)
            answered = data or file.read()
        if answered.startswith(_FAILED):
            raise WorkerError(
                f"rank {self._place.rank} asked rank {worker} for {name!r}, and rank {worker} failed to make the "
                f"answer:\n\n{answered.removeprefix(_FAILED).decode()}",
                rank=worker,
            )
        return answered.removeprefix(_MADE)

    def look(self, notified: bool = True) -> None:
        """Answer the ranks that have asked.

        Args:
            notified: whether somebody may have asked.
        """
        for name, make in list(self._served) if notified else []:
            asked = count(self._store, f"asked/{name}")
            new = range(self._seen[name] + 1, asked + 1)
            if len(new) > _MOST_QUESTIONS:
                raise ValueError(f"{len(new)} questions at once")
            self._open += [(f"{name}/{number}", make, self._notifier.clock.monotonic()) for number in new]
            self._seen[name] = asked
        self._open = [each for each in self._open if not self._answer(*each)]

    def _answer(self, question: str, make: Make, since: float) -> bool:
        """Answer another rank's question, and return whether it was time to."""
        asked = self._texts.read(f"ask/{question}")
        if not asked:
            return False  # it is about to be written
        request, path, rank, token = json.loads(asked)
        data = make(request, self._notifier.clock.monotonic() - since)
        if data is None:
            return False
        if self._store_is_file:  # else anybody may have named the path
            with suppress(OSError):  # there is no such file, or no place on its disk
                with open(path, "r+b") as file:
                    file.write(data)
                data = b""
        self._publish(f"{question}/{token}", data)
        self._notifier.notify(rank)
        return True

    def leave(self, *, failed: bool) -> None:
        """Publish for the last time what others may still ask for, and tell waiting ranks that this rank leaves."""
        for name, make in self._served:
            data = make(None, 0.0)
            if data is not None:
                self._publish(f"{name}/last", data)
        self._texts.set(f"left/{self._place.rank}", "failed" if failed else "")
        if self._store.check([f"awaited/{self._place.rank}"]):
            self._notifier.notify_all()

    def _wait(self, keys: tuple[str, ...], worker: int) -> bytes:
        """Wait until another rank has published one of the keys, and return what."""
        waits, within = f"rank {self._place.rank} waits for the work of rank {worker}", self._activity.wait_begun
        # What a rank asks another one while it waits anyway is a part of that wait.
        token = nullcontext() if within is not None else self._activity.waiting("work", (worker,), timed=False)
        try:
            with token:
                return bytes.fromhex(self._wait_while_it_lives(keys, worker, waits))
        except dist.DistNetworkError as error:
            raise WorkerDiedError(f"{waits}, but {store_is_gone(self._place, error)}") from None

    def _find(self, keys: tuple[str, ...]) -> list[str]:
        return [text for key in keys if (text := self._texts.read(key)) is not None]

    def _wait_while_it_lives(self, keys: tuple[str, ...], worker: int, waits: str) -> str:
        process = json.loads(self._store.get(f"here/{worker}"))
        if worker not in self._awaited:
            self._awaited.add(worker)
            self._store.set(f"awaited/{worker}", "")  # so that it notifies when it leaves
        is_gone = self._watch(worker, process)

        def look() -> list[str]:
            found = self._find(keys)
            left = None if found else self._texts.read(f"left/{worker}")
            if left is not None and not (found := self._find(keys)):
                if left:
                    raise WorkerError(f"{waits}, which has failed.", rank=worker, host=process["host"], secondary=True)
                raise CollectiveError(
                    f"{waits}, which has left the function already. Every rank must make the same calls in the "
                    "same order."
                )
            return found

        while not (found := self._notifier.wait_until(look, LOOK_SECONDS, is_gone)):
            if is_gone():
                raise WorkerDiedError(
                    f"{waits} on {process['host']} (pid {process['pid']}), whose process is gone. Look at what "
                    "it printed last.",
                    rank=worker,
                    host=process["host"],
                )
        return found[0]

    def _watch(self, worker: int, process: dict[str, Any]) -> Callable[[], bool]:
        """Return a function that returns whether a rank is gone, and costs the store little."""
        if self._supervised:
            return lambda: False  # whoever started the ranks ends them all when one dies
        if process["node"] == node():
            return lambda: not lives(process)
        note, changed, looked = b"", self._notifier.clock.monotonic(), 0.0

        def is_silent() -> bool:
            nonlocal note, changed, looked
            if self._notifier.clock.monotonic() - looked > LOOK_SECONDS:
                looked, latest = self._notifier.clock.monotonic(), read(self._store, f"seen/{worker}")
                note, changed = latest, looked if latest != note else changed
            return self._notifier.clock.monotonic() - changed > SILENT_SECONDS

        return is_silent


def _with_failures(make: Make) -> Make:
    """Return a function whose result is marked as what `make` has made, or as the traceback of its failure."""

    def answer(request: Any, waited: float) -> bytes | None:
        try:
            data = make(request, waited)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the channel's thread
            return _FAILED + tracebacks.as_text(error).encode()
        return None if data is None else _MADE + data

    return answer
