"""What the rooms ask where this thread is one of a simulated rank, which shares its process with the other ranks.

`distwrap.testing.simulate` sets the simulation for as long as it runs; nothing of it is imported before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Simulation(Protocol):
    """Simulation that runs in this process.

    Attributes:
        device: of all ranks.
        scheduler: of their threads, with their clock.
    """

    device: Any
    scheduler: Any

    def is_rank(self) -> bool:
        """Return whether this thread is one of a simulated rank."""

    def meet(self, placement: Any) -> Any:
        """Return the store of the ranks, in which this rank is registered."""

    def channel(self, *args: Any) -> Any:
        """Return a side channel, given what `Channel` takes."""

    def has_made(self, module: Any) -> bool:
        """Return whether this rank has made, copied or unpickled a module."""


running: Simulation | None = None


def thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Return a thread of this process, or of this simulated rank, with which it ends."""
    simulated = simulation()
    make = threading.Thread if simulated is None else simulated.scheduler.thread
    return make(target=run, name=name, daemon=True)


def condition() -> threading.Condition:
    """Return a condition for such threads."""
    simulated = simulation()
    return threading.Condition() if simulated is None else simulated.scheduler.condition()


def simulation() -> Simulation | None:
    """Return the simulation of which this thread is a rank's; ``None`` in any other thread."""
    return running if running is not None and running.is_rank() else None
