"""Notice of a preemption, and loader workers that live long enough to finish the step."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # by which clusters announce that they want the node back


@dataclass(frozen=True)
class Preemption:
    """Announcement by the cluster that it will take the node away.

    Attributes:
        signal: the number of the signal that announced it.
        rank: the rank that got the signal first.
        step: the number of steps that all ranks have made.
        deadline: the time at which the node is taken away, in seconds since the epoch.
    """

    signal: int
    rank: int
    step: int
    deadline: float

    def seconds_left(self) -> float:
        """Return the number of seconds that are left until the deadline."""
        return max(0.0, self.deadline - time.time())

    def __str__(self) -> str:
        return (
            f"rank {self.rank} got {signal.Signals(self.signal).name}, since its node will be taken away: "
            f"all ranks leave the loop after step {self.step}, with {self.seconds_left():.0f} s left"
        )


class Listener:
    """Handler that notes the first of some signals; a handler of the user's own runs too.

    Attributes:
        heard: the signal's number and when it came, in seconds since the epoch.
    """

    def __init__(self, signals: Iterable[int] = SIGNALS) -> None:
        self.heard: tuple[int, float] | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._before[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or (number, time.time())
        if callable(before := self._before.get(number)):
            before(number, frame)

    def close(self) -> None:
        """Put the handlers back that were there."""
        before, self._before = self._before, {}
        if threading.current_thread() is not threading.main_thread():
            return  # a generator that another thread collects
        for number, handler in before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def shielded(loader: Any, grace: float) -> Iterator[None]:
    """Start a loader's workers so that they outlive the signals that a cluster sends to every process of a job."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    before = loader.worker_init_fn
    loader.worker_init_fn = _Shield(before, grace)
    try:
        yield
    finally:
        loader.worker_init_fn = before


class _Shield:
    """Init function of a worker: its signals, then the user's own function."""

    def __init__(self, then: Callable[[int], None] | None, grace: float) -> None:
        self._then, self._grace = then, grace

    def __call__(self, worker: int) -> None:
        parent, seconds = os.getppid(), max(1, round(self._grace))

        def linger(number: int, frame: FrameType | None) -> None:
            if os.getppid() != parent:
                os._exit(0)
            signal.alarm(seconds)  # ends it then, if nobody has before

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in SIGNALS:
            signal.signal(number, linger)
        if self._then is not None:
            self._then(worker)
