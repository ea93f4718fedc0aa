"""Work of one rank for which others wait: as long as it takes, while that rank lives, and never longer."""

import json
import time
from collections import Counter
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.environments.identity import lives, node
from distwrap.errors import CollectiveError, WorkerDiedError
from distwrap.network.stores import count, read
from distwrap.supervision.failure_news import store_is_gone
from distwrap.supervision.stall_detection import StallDetector

SILENT_SECONDS = 120.0  # without a note, after which a working rank on another node counts as gone


class SharedWork:
    """Work that this rank gives to others, and its waits for theirs.

    Args:
        store: a client of its own.
        placement: this rank's place.
        stalls: told of waits, which may take as long as they like.
        supervised: whether a launcher of ours ends all ranks when one dies.
    """

    def __init__(self, store: Store, placement: Placement, stalls: StallDetector, supervised: bool) -> None:
        self._store, self._place, self._stalls, self._supervised = store, placement, stalls, supervised
        self._served: list[tuple[str, Callable[[], bytes]]] = []
        self._given: Counter[str] = Counter()

    def publish(self, key: str, data: bytes) -> None:
        """Give others the bytes for which they `wait_for`."""
        self._store.set(f"work/{key}", data.hex())  # torch's stores take text

    def wait_for(self, key: str, worker: int) -> bytes:
        """Wait for the bytes that another rank publishes: as long as it takes, while that rank lives.

        Raises:
            WorkerDiedError: that rank died.
            CollectiveError: that rank left the function without publishing them.
        """
        return self._wait(lambda: f"work/{key}" if self._store.check([f"work/{key}"]) else "", worker)

    def serve(self, name: str, make: Callable[[], bytes]) -> None:
        """Give other ranks from now on what they `ask` for; made in the channel's thread, within a quarter second."""
        self._served.append((name, make))

    def ask(self, name: str, worker: int) -> bytes:
        """Return what another rank serves by that name now, whatever else it does, or what it served last.

        Raises:
            WorkerDiedError: that rank died.
        """
        number, last = self._store.add(f"asked/{name}", 1), f"work/{name}/last"

        def latest() -> str:
            answered = count(self._store, f"answered/{name}")
            if answered >= number:
                return f"work/{name}/{answered}"
            return last if self._store.check([last]) else ""

        return self._wait(latest, worker)

    def look(self) -> None:
        """Give those who have asked what they asked for."""
        for name, make in list(self._served):
            asked = count(self._store, f"asked/{name}")
            if asked > self._given[name]:
                self.publish(f"{name}/{asked}", make())
                self._store.add(f"answered/{name}", asked - self._given[name])
                self._given[name] = asked

    def leave(self) -> None:
        """Publish for the last time what others may still ask for."""
        for name, make in self._served:
            self.publish(f"{name}/last", make())

    def _wait(self, find_key: Callable[[], str], worker: int) -> bytes:
        """Wait until `find_key` names the key of what another rank has published, and return it."""
        self._stalls.excuse(True)
        waits = f"rank {self._place.rank} waits for the work of rank {worker}"
        try:
            self._wait_while_it_lives(find_key, worker, waits)
            return bytes.fromhex(self._store.get(find_key()).decode())
        except dist.DistNetworkError as error:
            raise WorkerDiedError(f"{waits}, but {store_is_gone(self._place, error)}") from None
        finally:
            self._stalls.excuse(False)

    def _wait_while_it_lives(self, find_key: Callable[[], str], worker: int, waits: str) -> None:
        process = json.loads(self._store.get(f"here/{worker}"))
        pause, note, noted = 0.0005, b"", time.monotonic()
        while not find_key():
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            if self._store.check([f"left/{worker}"]) and not find_key():
                raise CollectiveError(
                    f"{waits}, which has left the function already. Every rank must make the same calls, in the same "
                    f"order."
                )
            if self._supervised:
                continue  # whoever started the ranks ends them all when one dies
            if process["node"] == node():
                gone = not lives(process)
            else:
                latest = read(self._store, f"seen/{worker}")
                if latest != note:
                    note, noted = latest, time.monotonic()
                gone = time.monotonic() - noted > SILENT_SECONDS
            if gone:
                raise WorkerDiedError(
                    f"{waits} on {process['host']} (pid {process['pid']}), which is gone. Look at what it printed "
                    f"last.",
                    rank=worker,
                    host=process["host"],
                )
