"""Functions of torch by which a proof sees forwards, backwards and epochs, without dropout, and gives loaders batches.

All were seen in versions 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from distwrap._internals.torch import replaced

_DROPOUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def watched(
    forward: Callable[[nn.Module, Any], Any],
    backward: Callable[[list[float]], None],
    epoch: Callable[[Any, Iterator[Any]], Iterator[Any]],
) -> Iterator[None]:
    """Call functions with what modules, backwards and loaders do within a ``with``.

    torch's hook for all modules is not given what is passed by name.

    Relies on ``torch.nn:Module.__call__``, ``torch.autograd:backward``, ``torch.utils.data:DataLoader.__iter__``.
    Without it: no samples are seen, gradients in the step alone, and no end of an epoch.

    Args:
        forward: called with each module and its ``(args, kwargs)``, in whose place it returns what the module gets.
        backward: called with the losses after each backward.
        epoch: called with each loader's data and iterator; returns what the loop gets.
    """
    real_call, real_backward, real_iter = nn.Module.__call__, torch.autograd.backward, DataLoader.__iter__

    @wraps(real_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = forward(self, (args, kwargs))
        return real_call(self, *args, **kwargs)

    @wraps(real_backward)
    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        real_backward(tensors, *args, **kwargs)
        losses = [tensors] if isinstance(tensors, Tensor) else tensors
        backward([float(each.detach()) for each in losses if each.numel() == 1])

    changes = [(nn.Module, "__call__", call), (torch.autograd, "backward", run_backward)]
    with replaced([*changes, (DataLoader, "__iter__", lambda loader: epoch(loader.dataset, real_iter(loader)))]):
        yield


@contextmanager
def without_dropout(left_out: Callable[[], None]) -> Iterator[None]:
    """Let dropout on the CPU change nothing within a ``with``: that of layers, functions, attention and RNNs.

    Relies on ``torch.library:Library.impl``, ``torch.library:Library._destroy``.
    Without it: loops with dropout are not comparable.

    Args:
        left_out: called where some would have been.
    """
    library_of: Any = torch.library.Library
    library = library_of("aten", "IMPL")

    def keep(values: Tensor, p: float, train: bool) -> Tensor:
        if p and train:
            left_out()
        return values

    for name in _DROPOUT:
        for key in ("CPU", "AutogradCPU"):  # with and without inference_mode
            library.impl(name, keep, key)
            library.impl(f"{name}_", keep, key)
    try:
        yield
    finally:
        library._destroy()


class _Cut(Subset[Any]):
    """First items of a data set, with its attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


@contextmanager
def batches_of(sizes: Callable[[Any, int, Any], tuple[int, int]], most: int = 0) -> Iterator[None]:
    """Give each loader that is made within a ``with`` another batch size, and data that divide evenly among the ranks.

    What is left over after whole batches of all ranks is left out: a loader that shuffles drops it, and one in order
    ends before it.

    Relies on ``torch.utils.data:DataLoader.__init__``.
    Without it: a loop is proven with the batches that it has.

    Args:
        sizes: returns, for a loader, the size that the loop has said, and the data, ``None`` with a sampler: the size
            on a rank, and how many ranks share the data where there is no sampler; 0 where it is left with its data.
        most: number of batches of all ranks after which data are cut off, where they can be; 0 where they are not.
    """
    real = DataLoader.__init__

    @wraps(real)
    def make(
        self: Any, dataset: Any, batch_size: Any = 1, shuffle: Any = None, sampler: Any = None, *args: Any, **kw: Any
    ) -> None:
        if batch_size is not None and kw.get("batch_sampler") is None and not any(args[:1]):
            batch_size, ranks = sizes(self, batch_size, dataset if sampler is None else None)
            whole = batch_size * ranks
            if isinstance(sampler, DistributedSampler):
                if most:
                    options = {name: getattr(sampler, name) for name in ("rank", "shuffle", "seed", "drop_last")}
                    samples = range(min(len(dataset), batch_size * sampler.num_replicas * most))
                    DistributedSampler.__init__(sampler, _Cut(dataset, samples), sampler.num_replicas, **options)
            elif whole and not isinstance(dataset, IterableDataset) and len(dataset) > whole:
                if most and sampler is None and len(dataset) > whole * most:
                    dataset = _Cut(dataset, range(whole * most))
                # Which loaders draw from in one process, and not on ranks: the loop's own numbers are to be alike.
                kw.setdefault("generator", torch.Generator().manual_seed(0))
                if sampler is None and not shuffle:
                    sampler = range(len(dataset) - len(dataset) % whole)
                elif len(args) < 5:  # the fifth of them says it
                    kw["drop_last"] = True
        real(self, dataset, batch_size, shuffle, sampler, *args, **kw)

    with replaced([(DataLoader, "__init__", make)]):
        yield
