"""Private names of torch's DataLoader, and of torchdata's StatefulDataLoader, which is derived from it.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from torch.utils.data import DataLoader, dataloader, get_worker_info

from distwrap.errors import LoaderError
from distwrap.versions import TORCH, TORCH_SEEN

_T_co = TypeVar("_T_co", covariant=True)
ITERATOR = "_iterator"  # holds the iterator whose workers outlive an epoch


class IteratorHook(DataLoader[_T_co]):
    """A DataLoader that lends itself other attributes for the moment in which an epoch's iterator is made."""

    def making_iterator(self) -> AbstractContextManager[None]:
        """Return the context in which the iterator is made."""
        raise NotImplementedError

    def _get_iterator(self) -> Any:
        with self.making_iterator():
            return super()._get_iterator()


def check_iterator_hook(cls: type[DataLoader[Any]]) -> None:
    """Refuse a class of loaders whose iterator is not made where `IteratorHook` looks.

    Relies on ``torch.utils.data:DataLoader._get_iterator``, ``torch.utils.data:DataLoader([0])._iterator``.
    Without it: LoaderError where a loader is sharded, since its workers could not be told their share.

    Raises:
        LoaderError: names the class.
    """
    if not hasattr(cls, "_get_iterator"):
        raise LoaderError(
            f"{cls.__name__} of torch {TORCH} makes its iterator elsewhere than in torch {TORCH_SEEN}, so "
            f"it cannot be sharded. Install one of these, or divide the data by a DistributedSampler of your own."
        )


def batches_given(iterator: Iterator[Any] | None) -> int | None:
    """Return the number of batches that a loader's iterator has given; ``None`` if it is unknown.

    Relies on ``torch.utils.data:DataLoader([0]).__iter__()._num_yielded``.
    Without it: hang reports do not say at which step.
    """
    count = getattr(iterator, "_num_yielded", None)
    return count if isinstance(count, int) else None


def held_iterators(loader: DataLoader[Any]) -> list[str]:
    """Return the attributes in which a loader of a class of its own holds an iterator over itself.

    Relies on ``torch.utils.data.dataloader:_BaseDataLoaderIter``.
    Without it: such a loader, as timm's and ultralytics' are, would go on over undivided data.
    """
    kind: Any = getattr(dataloader, "_BaseDataLoaderIter", ())
    return [name for name, value in vars(loader).items() if name != ITERATOR and isinstance(value, kind)]


def iterator_class() -> type:
    """Return the class of the iterators of all loaders of torch's.

    Relies on ``torch.utils.data.dataloader:_BaseDataLoaderIter``.
    Without it: the time that a loop waits for a loader that is not sharded counts as the loop's own.
    """
    return getattr(dataloader, "_BaseDataLoaderIter", type("NoIterator", (), {"__next__": None}))


def workers_of(iterator: Any) -> int | None:
    """Return the number of workers of a loader's iterator; ``None`` if it is unknown.

    Relies on ``torch.utils.data:DataLoader([0]).__iter__()._num_workers``.
    Without it: a report's advice does not say how many workers there are.
    """
    workers = getattr(iterator, "_num_workers", None)
    return workers if isinstance(workers, int) else None


def pins(iterator: Any) -> bool | None:
    """Return whether a loader's iterator pins the memory of its batches; ``None`` if it is unknown.

    Relies on ``torch.utils.data:DataLoader([0]).__iter__()._pin_memory``.
    Without it: a report does not advise to pin memory.
    """
    found = getattr(iterator, "_pin_memory", None)
    return found if isinstance(found, bool) else None


@contextmanager
def worker_info_shown(info: Any) -> Iterator[None]:
    """Let `get_worker_info` return `info` for the time of a ``with``; see `show_worker_info`."""
    before = get_worker_info()
    show_worker_info(info)
    try:
        yield
    finally:
        show_worker_info(before)


def show_worker_info(info: Any) -> None:
    """Let `get_worker_info` return `info` in this process.

    Relies on ``torch.utils.data._utils.worker:_worker_info``.
    Without it: an iterable dataset that divides its items among workers is not seen to do so: LoaderError.
    """
    with suppress(ImportError):
        from torch.utils.data._utils import worker

        worker._worker_info = info
    if get_worker_info() is not info:
        raise LoaderError(
            f"torch {TORCH} keeps a worker's information elsewhere than torch {TORCH_SEEN}, so an iterable "
            f"dataset cannot be divided among the ranks. Let it take its rank's part itself, and say "
            f"shard_loader(loader, split='dataset')."
        )


def forget_ended_workers() -> None:
    """Let torch forget workers that have ended badly, of which it would tell at the next end of any child.

    Relies on ``torch.utils.data._utils.signal_handling:_error_if_any_worker_fails``.
    Without it: an error of a loader's worker may be raised once more, after the run that it has ended.
    """
    with suppress(ImportError, AttributeError, RuntimeError):
        from torch.utils.data._utils import signal_handling

        signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]  # of torch._C
