"""What the rooms ask where this thread is one of a simulated rank, which shares its process with the other ranks.

`distwrap.testing.simulate` sets the simulation for as long as it runs; nothing of it is imported before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

running: Any = None  # the `distwrap.testing.simulation.simulation.Simulation` of this process


def thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Return a thread of this process, or of this simulated rank, with which it ends."""
    make: Any = threading.Thread if simulation() is None else running.scheduler.thread
    started: threading.Thread = make(target=run, name=name, daemon=True)
    return started


def condition() -> Any:
    """Return a condition for such threads."""
    return threading.Condition() if simulation() is None else running.condition()


def simulation() -> Any:
    """Return the simulation of which this thread is a rank's; ``None`` in any other thread."""
    return running if running is not None and running.is_rank() else None
