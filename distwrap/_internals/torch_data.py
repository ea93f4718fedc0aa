"""Private names of torch's DataLoader, from which torchdata's StatefulDataLoader is derived.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from torch.utils.data import DataLoader, dataloader, get_worker_info

from distwrap.errors import LoaderError
from distwrap.versions import TORCH, TORCH_SEEN

_T_co = TypeVar("_T_co", covariant=True)
ITERATOR = "_iterator"  # the attribute with the iterator of persistent workers


class IteratorHook(DataLoader[_T_co]):
    """DataLoader that changes attributes while the iterator of an epoch is made."""

    def making_iterator(self) -> AbstractContextManager[None]:
        """Return the context manager for making the iterator."""
        raise NotImplementedError

    def _get_iterator(self) -> Any:
        with self.making_iterator():
            return super()._get_iterator()


def check_iterator_hook(cls: type[DataLoader[Any]]) -> None:
    """Refuse a class of loaders that does not make its iterator where `IteratorHook` needs it.

    Relies on ``torch.utils.data:DataLoader._get_iterator``, ``torch.utils.data:DataLoader([0])._iterator``.
    Without it: sharding a loader raises LoaderError, since its workers would not know their share.

    Raises:
        LoaderError: the class does so; the message names it.
    """
    if not hasattr(cls, "_get_iterator"):
        raise LoaderError(
            f"{cls.__name__} of torch {TORCH} makes its iterator elsewhere than in torch {TORCH_SEEN}, so "
            f"it cannot be sharded. Install one of these, or divide the data by a DistributedSampler of your own."
        )


def batches_given(iterator: Iterator[Any] | None) -> int | None:
    """Return how many batches a loader's iterator has returned, or ``None`` if unknown.

    Relies on ``torch.utils.data:DataLoader([0]).__iter__()._num_yielded``.
    Without it: hang reports do not say the step.
    """
    count = getattr(iterator, "_num_yielded", None)
    return count if isinstance(count, int) else None


def held_iterators(loader: DataLoader[Any]) -> list[str]:
    """Return the names of attributes in which a custom loader holds an iterator over itself.

    Relies on ``torch.utils.data.dataloader:_BaseDataLoaderIter``.
    Without it: such loaders, as timm's and ultralytics', continue with undivided data.
    """
    kind: Any = getattr(dataloader, "_BaseDataLoaderIter", ())
    return [name for name, value in vars(loader).items() if name != ITERATOR and isinstance(value, kind)]


def iterator_class() -> type:
    """Return the base class of the iterators of torch's loaders.

    Relies on ``torch.utils.data.dataloader:_BaseDataLoaderIter``.
    Without it: waiting for a loader that is not sharded counts as the loop's own time.
    """
    return getattr(dataloader, "_BaseDataLoaderIter", type("NoIterator", (), {"__next__": None}))


def workers_of(iterator: Any) -> int | None:
    """Return the number of workers of a loader's iterator, or ``None`` if unknown.

    Relies on ``torch.utils.data:DataLoader([0]).__iter__()._num_workers``.
    Without it: a report's advice does not have the number of workers.
    """
    workers = getattr(iterator, "_num_workers", None)
    return workers if isinstance(workers, int) else None


@contextmanager
def worker_info_shown(info: Any) -> Iterator[None]:
    """Let `get_worker_info` return `info` within a ``with``, as `show_worker_info` does."""
    before = get_worker_info()
    show_worker_info(info)
    try:
        yield
    finally:
        show_worker_info(before)


def show_worker_info(info: Any) -> None:
    """Let `get_worker_info` return `info` in this process.

    Relies on ``torch.utils.data._utils.worker:_worker_info``.
    Without it: LoaderError, since datasets could not divide their items among ranks and workers.
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
    """Remove failed workers from torch's records, which it would report when any child process ends.

    Relies on ``torch.utils.data._utils.signal_handling:_error_if_any_worker_fails``.
    Without it: the error of a loader's worker may be raised again after the run that it has ended.
    """
    with suppress(ImportError, AttributeError, RuntimeError):
        from torch.utils.data._utils import signal_handling

        signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]  # of torch._C
