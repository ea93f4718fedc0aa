"""A progress bar on rank 0 alone."""

import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from distwrap.group.world import is_rank_zero

Item = TypeVar("Item")

_SECONDS = 5.0  # between two lines of plain text


def progress(iterable: Iterable[Item], *, desc: str | None = None, **tqdm_options: Any) -> Iterable[Item]:
    """Show the progress of rank 0, with tqdm if it is installed, else by lines of text; other ranks are quiet.

    Args:
        iterable: the iterable to go through, such as a sharded loader.
        desc: the words in front of the bar.
        **tqdm_options: options of tqdm, as ``total`` or ``leave``.

    Returns:
        An iterable over the same items; on rank 0 with tqdm it is the bar itself.

    Example:
        >>> sum(progress(range(3), disable=True))
        3
    """
    if not is_rank_zero():
        return iterable
    if importlib.util.find_spec("tqdm") is not None:
        from tqdm.auto import tqdm

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # tqdm's monitor is a thread that outlives the bar, and forbids to fork

            def __init__(self) -> None:
                super().__init__(_OfLength(iterable), desc=desc, **tqdm_options)
                self.iterable = iterable  # tqdm.auto asks at once for an iterator, for which a loader starts workers

        return Bar()
    if tqdm_options.get("disable"):
        return iterable
    return _InText(iterable, desc or "progress")


class _OfLength(Iterable[Item]):
    """Stand-in for an iterable, which nothing begins to iterate over."""

    def __init__(self, iterable: Iterable[Item]) -> None:
        self._of = iterable

    def __iter__(self) -> Iterator[Item]:
        yield from self._of

    def __len__(self) -> int:
        return len(self._of)  # type: ignore[arg-type]


class _InText(Iterable[Item]):
    def __init__(self, iterable: Iterable[Item], desc: str) -> None:
        self.iterable, self._desc = iterable, desc

    def __iter__(self) -> Iterator[Item]:
        try:
            total = f" of {len(self.iterable)}"  # type: ignore[arg-type]
        except TypeError:
            total = ""
        start = last = time.monotonic()
        count = 0
        for count, item in enumerate(self.iterable, 1):
            yield item
            now = time.monotonic()
            if now - last >= _SECONDS:
                print(f"{self._desc}: {count}{total}, {now - start:.0f} s", file=sys.stderr, flush=True)
                last = now
        print(f"{self._desc}: {count}{total}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
