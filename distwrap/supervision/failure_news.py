"""News of failures: a rank tells of its own, ranks of one node see each other die, and all end with the first cause.

Where a launcher of ours supervises the ranks, it does this better, and the ranks only tell.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from distwrap._internals.python import multiprocessing_settings
from distwrap.environments import Placement
from distwrap.environments.identity import lives, node
from distwrap.network.signed_texts import SignedTexts
from distwrap.supervision.failure import Failure
from distwrap.supervision.hang_report import last_seen
from distwrap.supervision.notifier import Notifier
from distwrap.wording import first_line, print_notice

NEWS_SECONDS = 1.0  # for a rank to end by itself once another has failed


class FailureNews:
    """Endpoint at which this rank reports its own failure and reads about others'.

    Args:
        notifier: of the ranks.
        texts: by which to know what its ranks have written.
        placement: this rank's place.
        supervised: whether a launcher of ours waits for the ranks' processes, and tells of their ends.
        stopped: set once this rank leaves in order.

    Attributes:
        on_loss: called, from the channel's thread, before this process is ended for another rank's failure.
    """

    def __init__(
        self, notifier: Notifier, texts: SignedTexts, placement: Placement, supervised: bool, stopped: threading.Event
    ) -> None:
        self._notifier, self._store, self._texts = notifier, notifier.store, texts
        self._place, self._supervised, self._stopped = placement, supervised, stopped
        self.on_loss: Callable[[Failure], None] | None = None
        self._neighbour: tuple[int, dict[str, Any]] | None = None
        self._knows_neighbour = False

    def tell(self, failure: Failure) -> None:
        """Tell the other ranks of a failure; the first that is told is believed to be the cause."""
        with contextlib.suppress(RuntimeError):
            self._tell(failure)

    def wait_for_cause(self, seconds: float) -> Failure | None:
        """Wait a moment for an earlier failure of another rank; return ``None`` if this rank's failure is the first."""
        try:
            failure = self._notifier.wait_until(self._first, seconds)
        except dist.DistError as error:
            return store_is_gone(self._place, error)
        return failure if failure is not None and failure.rank != self._place.rank else None

    def look(self, notified: bool = True) -> None:
        """End this process if another rank has failed, and this one, which may wait for it, does not end by itself.

        Args:
            notified: whether there may be news of another node's rank.
        """
        if self._supervised:
            return
        self._look_after_neighbour()
        failure = self._first() if notified else None
        if failure is None or failure.rank == self._place.rank or self._stopped.wait(NEWS_SECONDS):
            return
        first_on_another_node = self._place.local_rank == 0 and failure.host != socket.gethostname()
        trace = failure.traceback.rstrip() if first_on_another_node else ""
        if self.on_loss is not None:
            self.on_loss(failure)
        end_process(self._place.rank, f"{failure}\n{trace}" if trace else str(failure))

    def _first(self) -> Failure | None:
        """Return the failure that came first."""
        news = self._texts.read("failure")
        return Failure.from_json(news) if news else None

    def _find_neighbour(self) -> tuple[int, dict[str, Any]] | None:
        """Return the next rank of this node and its registration; each rank watches the next, so all are watched."""
        place = self._place
        rank = place.rank - place.local_rank + (place.local_rank + 1) % place.local_world_size
        if place.local_world_size == 1 or rank >= place.world_size:
            return None
        registration = json.loads(self._store.get(f"here/{rank}"))
        return (rank, registration) if registration["node"] == node() else None

    def _look_after_neighbour(self) -> None:
        if not self._knows_neighbour:
            self._knows_neighbour, self._neighbour = True, self._find_neighbour()
        if self._neighbour is None:
            return
        rank, process = self._neighbour
        if lives(process):
            return
        self._neighbour = None
        if self._texts.read(f"left/{rank}") is not None:
            return
        summary = f"its process died without raising an exception{last_seen(self._store, rank)}"
        self._tell(Failure.in_own_words(rank, summary, host=process["host"], pid=process["pid"]))

    def _tell(self, failure: Failure) -> None:
        if self._texts.set_first("failure", failure.to_json()):
            self._notifier.notify_all()


def store_is_gone(placement: Placement, error: Exception) -> Failure:
    """Describe the loss of the process that holds the store, which is rank 0 or its launcher."""
    summary = f"rank 0, or its launcher, is gone: its store does not answer ({first_line(error)})"
    return Failure.in_own_words(0, summary, host=str(placement.master_addr), pid=0)


def end_process(rank: int, why: str) -> NoReturn:
    """End this process and its loader workers at once, from any thread."""
    with contextlib.suppress(OSError, ValueError):  # whoever was to read it may be gone, with whoever started this
        print_notice(f"rank {rank} ends, because {why}")
    for child in multiprocessing.active_children():  # loader workers
        child.kill()
    folder = multiprocessing_settings().get("tempdir")
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
