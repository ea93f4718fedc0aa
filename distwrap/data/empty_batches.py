"""Ranks without samples: a batch without any, for a rank that is out of data, and loaders that would have no step."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from distwrap.data.samplers import ExactBatches
from distwrap.errors import LoaderError
from distwrap.group.collectives import gather_object
from distwrap.nesting import refilled

_NONE: Any = object()


def emptied(batch: Any) -> Any:
    """Return a batch of the same form without a sample, as torch's default collate function would make it.

    Tensors and arrays lose their rows, and lists of texts or numbers their items. Dicts, tuples and lists of tensors
    are columns, which keep their form; what has no rows, as a single number, stays.

    Raises:
        LoaderError: there is something of another kind; names the type.

    Example:
        >>> emptied({"x": torch.ones(2, 3), "names": ["a", "b"], "epoch": 1})
        {'x': tensor([], size=(0, 3)), 'names': [], 'epoch': 1}
    """
    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.dim() else batch
    if batch is None or isinstance(batch, (str, bytes, bool, int, float, complex)):
        return batch
    if isinstance(batch, dict):
        return refilled(batch, [emptied(each) for each in batch.values()])
    if isinstance(batch, (list, tuple)):
        if all(each is None or isinstance(each, (str, bytes, bool, int, float, complex)) for each in batch):
            return batch[:0]
        return refilled(batch, [emptied(each) for each in batch])
    if hasattr(batch, "dtype") and hasattr(batch, "shape"):  # an array of numpy's
        return batch[:0] if batch.shape else batch
    raise LoaderError(
        f"no empty batch can be made from a {type(batch).__qualname__}, which a rank that is out of data "
        "needs. Say how, as in lockstep(loader, uneven='empty', empty=lambda batch: batch[:0])."
    )


class EmptyBatches:
    """Empty batches of one loop, for the steps in which this rank has no data left.

    Args:
        empty: a function that makes an empty batch from another one.

    Attributes:
        are_due: whether the rank is out of data.
        batch: an empty batch.
    """

    def __init__(self, empty: Callable[[Any], Any]) -> None:
        self._empty, self._latest = empty, _NONE
        self.are_due, self.batch = False, _NONE

    @property
    def are_unknown(self) -> bool:
        """Whether an empty batch is due that this rank does not have yet."""
        return self.are_due and self.batch is _NONE

    def note(self, batch: Any) -> None:
        """Keep a batch from which an empty one can be made."""
        self._latest = batch

    def begin(self) -> None:
        """Take note that the rank is out of data."""
        self.are_due = True

    def agree(self) -> None:
        """Give an empty batch to all ranks that need one; a rank that never had a batch takes that of another rank.

        Raises:
            LoaderError: a rank cannot make one; on every rank.
        """
        made, problem = _NONE, ""
        if self._latest is not _NONE:
            try:
                made = self._empty(self._latest)
            except Exception as error:  # noqa: BLE001 - whatever it is, all ranks hear of it
                problem = f"{type(error).__name__}: {error}" if not isinstance(error, LoaderError) else str(error)
        everyone = gather_object((problem, made is not _NONE, made if made is not _NONE else None))
        for rank, (problem, _, _) in enumerate(everyone):
            if problem:
                raise LoaderError(f"rank {rank}: {problem}")
        if self.are_due:
            found = [batch for _, is_there, batch in everyone if is_there]
            self.batch = made if made is not _NONE else found[0]
            self._latest = _NONE


def refuse_no_steps(loader: DataLoader[Any], sharded: DataLoader[Any], world_size: int) -> None:
    """Raise LoaderError if ``drop_last=True`` leaves no rank a batch where one process has some."""
    with suppress(TypeError):  # a sampler without a length
        batches = sharded.batch_sampler
        steps = batches.count() if isinstance(batches, ExactBatches) else len(sharded)  # the same on every rank
        if loader.drop_last and len(loader) and not steps:
            raise LoaderError(
                f"shard_loader(): over {world_size} ranks this loader has no step, where one process has "
                f"{len(loader)}: a rank's share fills no batch, and drop_last=True leaves out what fills none. Take a "
                "smaller batch_size, shard_loader(loader, batch_size='global'), or fewer ranks."
            )
