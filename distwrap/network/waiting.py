"""Wait with a time limit: for something to come true, for all to be counted, or for torch, which may know no limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:  # the command `where` comes here without torch
    from torch.distributed import Store  # type: ignore[attr-defined]

Found = TypeVar("Found")


class Clock(Protocol):
    """Clock by which ranks wait, and find out that they wait: `time` itself, or one of a test, whose time flies."""

    def monotonic(self) -> float: ...

    def process_time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


def wait_until(find: Callable[[], Found], seconds: float, longest_pause: float = 0.02, *, clock: Clock = time) -> Found:
    """Call a function until what it returns is true, and return that; after the time limit, what it returned last.

    Args:
        find: called at least once.
        seconds: time limit.
        longest_pause: seconds between two calls, which begin at half a millisecond and double up to this.
        clock: the clock by which it waits.

    Example:
        >>> wait_until(iter([0, 0, 3, 4]).__next__, seconds=10)
        3
    """
    deadline, pause = clock.monotonic() + seconds, 0.0005
    while not (found := find()) and clock.monotonic() < deadline:
        clock.sleep(pause)
        pause = min(2 * pause, longest_pause)
    return found


def pause_between_looks(ranks: int) -> float:
    """Return for how many seconds a rank leaves alone a store at which so many of them look."""
    return min(0.5, max(0.01, ranks / 4096))


def count_in(store: Store, what: str, size: int) -> None:
    """Count this rank or node, and let the others know when it is the last: a key for each would be asked for by each.

    Args:
        store: store in which they are counted.
        what: what they have done, each once.
        size: number of ranks or nodes.
    """
    if store.add(f"{what}/count", 1) == size:
        store.set(f"{what}/all", "")


def are_all_counted(store: Store, what: str, waiting: int, seconds: float = 1.0, *, clock: Clock = time) -> bool:
    """Wait, and return whether all are counted: while torch itself waits, Ctrl-C is not heard.

    Args:
        store: store in which they are counted.
        what: as at `count_in`.
        waiting: number of ranks or nodes that wait for it.
        seconds: time limit.
        clock: the clock by which it waits.
    """
    return wait_until(lambda: store.check([f"{what}/all"]), seconds, pause_between_looks(waiting), clock=clock)


def run_within(work: Callable[[], Found], seconds: float) -> Found | None:
    """Return what work on a store returns; ``None`` where it fails, or is given up after the time limit.

    It runs in a thread: torch waits long for a network that is gone, and forever for who listens and never answers.
    """
    found: list[Found] = []

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            found.append(work())

    thread = threading.Thread(target=run, name="distwrap-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
