"""Average weights at fixed times in a background thread, while each rank trains at its own pace.

Source: https://arxiv.org/abs/2107.01499, section 3; Bagua's ``AsyncModelAverageAlgorithm``, whose thread writes weights
while an optimizer may read them. Here the training thread alone reads and writes weights, between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from distwrap.checks import whole
from distwrap.comm.base import Link, option
from distwrap.comm.exchange import PATIENCE
from distwrap.comm.weights import WeightAlgorithm, WeightExchange
from distwrap.devices.kinds import Given, SideStream
from distwrap.errors import CollectiveTimeoutError
from distwrap.group.world import World
from distwrap.model.distributed import DistributedModel
from distwrap.simulated import condition, simulation, thread

_STEP_SECONDS = 0.1  # of a simulated rank, for a step


class AsyncExchange(WeightExchange["AsyncAveraging"]):
    """Exchange with a thread that gets copies of the weights, and returns by how much to move them.

    If the algorithm is hierarchical, only the first rank of each node has the thread. At each step it sends the other
    ranks of its node whether and how far to move. When the model is dropped, the thread takes part until all ranks have
    dropped it, as in a pause.

    Attributes:
        rounds: the number of means so far.
    """

    def __init__(self, algorithm: AsyncAveraging, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        self._interval, self._patience = algorithm.sync_interval_ms / 1000, world.options.timeout
        self.rounds = 0
        self._changed = condition()
        self._runs = self._resumes = self._closed = False
        self._pausing = self._wanted = False
        self._side = SideStream(self.device)
        self._snapshot: Given | None = None
        self._move: Given | None = None
        self._paused_at: Any = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def after_step(self, step: int) -> None:
        if self._failure is not None:
            raise self._failure
        if simulation() is not None:
            time.sleep(_STEP_SECONDS)  # in which its thread may go on
        if self._move is not None or self.node is not None:
            self._take_over()
        if self._wanted:
            with self._changed:
                self._hand_out()
                self._changed.notify_all()

    def _take_over(self) -> None:
        """Add the thread's result to the weights; the ranks of a node do so together."""
        with self._changed:
            given, self._move = self._move, None
        move = None if given is None else self._side.taken(given)
        if self.node is not None:
            move = self.engine.call(partial(self._from_first, self.node, move))
        if move is not None:
            self.weights.write(self.weights.read().add_(move))

    def _from_first(self, node: Link, move: torch.Tensor | None) -> torch.Tensor | None:
        """Return the result that the first rank of the node has, or ``None``."""
        is_there = torch.tensor([move is not None], dtype=torch.uint8, device=self.device)
        node.from_first(is_there)
        if not is_there.item():
            return None
        if node.rank or move is None:
            move = self.weights.read()
        node.from_first(move)
        return move

    def _hand_out(self) -> None:
        """Give the thread a copy of the weights, with the result that is not yet added to them."""
        weights, self._wanted = self.weights.read(), False
        if self._move is not None:
            weights.add_(self._side.taken(self._move))
        self._snapshot = self._side.given(weights)

    def settle(self) -> None:
        """Stop averaging when all ranks have called this; until then this rank takes part."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._pausing, self._paused_at = True, self._side.moment()
                self._changed.notify_all()
            thread.join(self._patience)
            if thread.is_alive():
                raise CollectiveTimeoutError(
                    f"rank {self.rank} paused its averaging, and other ranks had not paused after "
                    f"{self._patience:g} s: every rank must call consolidate() and pause() as often as the "
                    "others, and reach the function's end."
                )
        if self._failure is not None:
            raise self._failure
        if self._runs:
            self._runs = False
            self._take_over()

    def before_step(self) -> None:
        """Start averaging, also again after a pause."""
        if self._runs:
            return
        self._runs, self._pausing = True, False
        if self.link is not None:
            self._thread = thread(partial(self._run, self.link), "distwrap-async")
            self._thread.start()

    def _run(self, link: Link) -> None:
        try:
            with self._side.current():  # in the model's stream, a step would wait for the other ranks
                self._average(link)
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._failure = error

    def _average(self, link: Link) -> None:
        while not link.least(int(self._pausing or self.model is None), self.device):
            own = self._take_snapshot()
            if own is None:
                return
            mean = own.clone()
            link.mean(mean)
            moved = mean.sub_(own)
            with self._changed:
                self._move = self._side.given(moved if self._move is None else self._side.taken(self._move) + moved)
            self.rounds += 1
            self._rest()

    def _take_snapshot(self) -> torch.Tensor | None:
        """Wait until the training thread is between two steps, and return a copy of its weights."""
        with self._changed:
            self._wanted = True
            while self._snapshot is None:
                if self._closed:
                    return None
                if self._pausing or self.model is None:
                    self._side.wait(self._paused_at)
                    self._hand_out()
                else:
                    self._changed.wait(1.0)
            snapshot, self._snapshot = self._snapshot, None
        return self._side.taken(snapshot)

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
            self.before_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop averaging within a ``with``, which all ranks enter and leave."""
        self.settle()
        try:
            yield
        finally:
            self.before_step()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(PATIENCE)
            if thread.is_alive():
                self.keep_groups()  # the thread waits in a group for ranks that do not come any more
        super().close()


@dataclass(frozen=True, kw_only=True)
class AsyncAveraging(WeightAlgorithm):
    """Mean of all ranks' weights every `sync_interval_ms`. Each rank adds mean - own to its weights.

    Ranks keep the progress that they make meanwhile, and may take different numbers of steps.

    Args:
        sync_interval_ms: milliseconds between two means.
    """

    exchange_class = AsyncExchange
    sync_interval_ms: int = option(500, whole(0))
