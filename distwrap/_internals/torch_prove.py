"""Functions of torch by which a proof sees each backward, and gives loaders their batches.

All were seen in versions 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from distwrap._internals.torch_simulation import replaced


@contextmanager
def hooked_backward(ended: Callable[[list[float]], None]) -> Iterator[None]:
    """Call a function with the losses after each backward within a ``with``.

    Relies on ``torch.autograd:backward``.
    Without it: gradients are seen in the step alone.
    """
    real = torch.autograd.backward

    @wraps(real)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        real(tensors, *args, **kwargs)
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        ended([float(each.detach()) for each in losses if each.numel() == 1])

    with replaced([(torch.autograd, "backward", backward)]):
        yield


@contextmanager
def batches_of(size: Callable[[int], int], ranks: int) -> Iterator[None]:
    """Give each loader that is made within a ``with`` another batch size, and data that divide evenly among the ranks.

    What is left over after whole batches of all ranks is left out: a loader that shuffles drops it, and one in order
    ends before it.

    Relies on ``torch.utils.data:DataLoader.__init__``.
    Without it: a loop is proven with the batches that it has.

    Args:
        size: returns the size on a rank for the one that the loop has said.
        ranks: that share the data of a loader which has no sampler; 0 where each loader is left with its data.
    """
    real = DataLoader.__init__

    @wraps(real)
    def make(
        self: Any, dataset: Any, batch_size: Any = 1, shuffle: Any = None, sampler: Any = None, *args: Any, **kw: Any
    ) -> None:
        if batch_size is not None and kw.get("batch_sampler") is None and not any(args[:1]):
            batch_size = size(batch_size)
            whole = batch_size * ranks
            if whole and not isinstance(dataset, IterableDataset) and len(dataset) > whole:
                # Which loaders draw from in one process, and not on ranks: the loop's own numbers are to be alike.
                kw.setdefault("generator", torch.Generator().manual_seed(0))
                if sampler is None and not shuffle:
                    sampler = range(len(dataset) - len(dataset) % whole)
                elif len(args) < 5:  # the fifth of them says it
                    kw["drop_last"] = True
        real(self, dataset, batch_size, shuffle, sampler, *args, **kw)

    with replaced([(DataLoader, "__init__", make)]):
        yield
