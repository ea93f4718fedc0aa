"""Facts about a loop over a loader before its batches come: their number, and whether it is in lockstep."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from distwrap.data.lockstep import Lockstep
from distwrap.data.sharded import ShardedLoader


def lockstep_of(loader: Any) -> Lockstep[Any] | None:
    """Return the loop in step that is under way over a loader; ``None`` where there is none."""
    loader = _under_bars(loader)
    if isinstance(loader, ShardedLoader):
        return loader._sharding.lockstep
    return loader if isinstance(loader, Lockstep) else None


def _under_bars(loader: Any) -> Any:
    """Return the iterable under a progress bar, which may be shown on one rank only."""
    while not isinstance(loader, DataLoader) and isinstance(getattr(loader, "iterable", None), Iterable):
        loader = loader.iterable
    return loader


def batches_left(loader: Any) -> int | None:
    """Return the number of batches of the next iteration over a loader on this rank; ``None`` if it is unknown."""
    inner = _under_bars(loader)
    if isinstance(inner, Lockstep) or (isinstance(inner, ShardedLoader) and inner._sharding.uneven):
        return None
    try:
        whole = len(loader)
        if not isinstance(inner, ShardedLoader) or whole != len(inner):
            return whole
        return inner.batches_to_come()
    except TypeError:
        return None
