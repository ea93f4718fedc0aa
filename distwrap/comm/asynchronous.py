"""Weights averaged by the clock, in the background, while each rank trains at its own pace.

Source: https://arxiv.org/abs/2107.01499, section 3; Bagua's ``AsyncModelAverageAlgorithm``, whose thread writes weights
while an optimizer may read them. Here weights are read and written between two steps only, by the training thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from distwrap.checks import whole
from distwrap.comm.engine import PATIENCE
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange
from distwrap.errors import CollectiveTimeoutError
from distwrap.group.world import World

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel


@dataclass(frozen=True, kw_only=True)
class AsyncAveraging(WeightAlgorithm):
    """Every `sync_interval_ms` a mean of all ranks' weights is computed, and each rank moves by mean - own.

    The progress that a rank makes meanwhile is kept. Ranks may take different numbers of steps.

    Args:
        sync_interval_ms: milliseconds from one mean to the next.
    """

    sync_interval_ms: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(0)("sync_interval_ms", self.sync_interval_ms)

    def attach(self, model: DistributedModel, world: World) -> AsyncExchange:
        return AsyncExchange(self, model, world)


class AsyncExchange(WeightExchange[AsyncAveraging]):
    """A thread that averages, and a training thread that hands it weights and takes back how far to move.

    Where the algorithm is hierarchical, only the nodes' first ranks have the thread, and tell the rest of their node at
    each step whether to move.

    Attributes:
        rounds: how many means there were.
    """

    def __init__(self, algorithm: AsyncAveraging, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        self._interval, self._patience = algorithm.sync_interval_ms / 1000, world.timeout
        self.rounds = 0
        self._changed = threading.Condition()
        self._runs = self._resumes = self._closed = False
        self._parked = self._pausing = self._wanted = False
        self._snapshot: torch.Tensor | None = None
        self._move: torch.Tensor | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def drop(self) -> None:
        self._parked = self._pausing = True  # the thread ends when all ranks have dropped the model
        super().drop()

    def begin(self) -> None:
        self.resume()

    def after_step(self, step: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._move is not None or self.node is not None:
            self._take_over()
        if self._wanted:
            with self._changed:
                self._hand_out()
                self._changed.notify_all()

    def _take_over(self) -> None:
        """Move by what has come; the ranks of a node together."""
        with self._changed:
            move, self._move = self._move, None
        if self.node is not None:
            move = self.engine.call(partial(self._of_node, self.node, move))
        if move is not None:
            self.weights.write(self.weights.read().add_(move))

    def _of_node(self, node: Link, move: torch.Tensor | None) -> torch.Tensor | None:
        """Return what the node's first rank has."""
        there_is = torch.tensor([move is not None], dtype=torch.uint8, device=self.device)
        node.from_first(there_is)
        if not there_is.item():
            return None
        if node.rank or move is None:
            move = self.weights.read()
        node.from_first(move)
        return move

    def _hand_out(self) -> None:
        """Give the thread a copy of the weights, where they will be once they have moved."""
        self._snapshot, self._wanted = self.weights.read(), False
        if self._move is not None:
            self._snapshot.add_(self._move)

    def settle(self) -> None:
        self.pause()

    def pause(self) -> None:
        """Stop averaging, when all ranks have called this; until then this one goes on taking part."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._parked = self._pausing = True
                self._changed.notify_all()
            thread.join(self._patience)
            if thread.is_alive():
                raise CollectiveTimeoutError(
                    f"rank {self.rank} paused its averaging, and after {self._patience:g} s not all ranks have paused: "
                    f"every rank must come to consolidate(), pause() and the function's end."
                )
        if self._failure is not None:
            raise self._failure
        if self._runs:
            self._runs = False
            self._take_over()

    def resume(self) -> None:
        """Average again."""
        if self._runs:
            return
        self._runs, self._parked, self._pausing = True, False, False
        if self.link is not None:
            self._thread = threading.Thread(target=self._run, args=(self.link,), name="distwrap-async", daemon=True)
            self._thread.start()

    def _run(self, link: Link) -> None:
        try:
            while not link.least(int(self._pausing), self.device):
                mine = self._taken()
                if mine is None:
                    return
                mean = mine.clone()
                link.mean(mean)
                with self._changed:
                    moved = mean.sub_(mine)
                    self._move = moved if self._move is None else self._move.add_(moved)
                self.rounds += 1
                self._rest()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._failure = error

    def _taken(self) -> torch.Tensor | None:
        """Wait for the training thread to be between two steps, and return a copy of the weights."""
        with self._changed:
            self._wanted = True
            while self._snapshot is None:
                if self._closed:
                    return None
                if self._parked:
                    self._hand_out()
                else:
                    self._changed.wait(1.0)
            mine, self._snapshot = self._snapshot, None
            return mine

    def _rest(self) -> None:
        until = time.monotonic() + self._interval
        with self._changed:
            while not self._pausing and not self._closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def consolidate(self) -> torch.Tensor:
        self._resumes = self._runs
        return super().consolidate()

    def restore(self, own: torch.Tensor) -> None:
        super().restore(own)
        if self._resumes:
            self.resume()

    def before_step(self) -> None:
        self.resume()  # after a pause that nobody has ended, as a consolidate() for good

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop averaging for the time of a ``with``; all ranks enter and leave it."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(PATIENCE)
            if thread.is_alive():
                self.keep_groups()  # it waits in one for ranks that do not come any more
        super().close()
