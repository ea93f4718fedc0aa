"""Private names of torch's DataLoader.

Seen in torch 2.6 to 2.13, and in torchdata's StatefulDataLoader 0.11:
`DataLoader._get_iterator` makes the iterator of an epoch, also within a subclass whose ``__iter__`` is a generator.
Without it a sharded loader could not tell its workers their share.
`DataLoader._iterator` holds the iterator whose workers outlive an epoch. Without it a copied loader would share them.
`torch.utils.data._utils.worker._worker_info` is what `get_worker_info` returns. Without it an iterable dataset that
divides its items among workers would not be seen to do so, and every n-th item would be taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

ITERATOR = "_iterator"


class IteratorHook(DataLoader[Any]):
    """A DataLoader that lends itself other attributes for the moment in which an epoch's iterator is made."""

    def making_iterator(self) -> AbstractContextManager[None]:
        """Return the context in which the iterator is made."""
        raise NotImplementedError

    def _get_iterator(self) -> Any:
        with self.making_iterator():
            return super()._get_iterator()


@contextmanager
def worker_info_shown(info: Any) -> Iterator[None]:
    """Let `get_worker_info` return `info` for the time of a ``with``."""
    before = get_worker_info()
    show_worker_info(info)
    try:
        yield
    finally:
        show_worker_info(before)


def show_worker_info(info: Any) -> None:
    """Let `get_worker_info` return `info` in this process."""
    from torch.utils.data._utils import worker

    worker._worker_info = info
