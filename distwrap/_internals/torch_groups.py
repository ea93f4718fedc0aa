"""Private names of torch: its process groups.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]


def set_group_timeout(seconds: float) -> None:
    """Set the time limit of the process group's collectives, which its making has too.

    Relies on ``torch.distributed.distributed_c10d:_set_pg_timeout``.
    Without it: the time limit of making the group holds for its collectives.
    """
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        change(timedelta(seconds=seconds))


def default_store() -> Store | None:
    """Return the store in which the ranks of the process group have met, ``None`` where torch does not tell.

    Relies on ``torch.distributed.distributed_c10d:_get_default_store``.
    Without it: `save` is a collective in a group that the user made, and rank 0 must not call it alone there.
    """
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if found is None else found()


def collectives_begun(group: dist.ProcessGroup | None = None) -> int | None:
    """Return how many collectives this rank has begun in the group of all ranks, and in another one.

    Relies on ``torch.distributed:ProcessGroup._get_sequence_number_for_group``.
    Without it: fit_batch_size tries again although ranks have begun different numbers of them, and gradients averaged
    by hand are told from others by being equal on all ranks alone.

    Returns:
        The number; ``None`` without groups, and where a backend does not tell.
    """
    groups = {id(each): each for each in (dist.group.WORLD, group) if each is not None}
    counts = [getattr(each, "_get_sequence_number_for_group", None) for each in groups.values()]
    with suppress(RuntimeError):  # a backend that does not count
        return sum(int(count()) for count in counts if count is not None) if any(counts) else None
    return None


def waits_for_ranks() -> list[tuple[Any, str]]:
    """Return where a rank waits for others in torch's own code, as owners and names, beside its public collectives.

    Relies on ``torch.distributed:_broadcast_coalesced``, ``torch.distributed._functional_collectives:wait_tensor``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard``.
    Without it: in a report such a wait is a part of the forward or the backward around it.
    """
    found: list[tuple[Any, str]] = [(torch.futures.Future, "wait")]
    if dist.is_available():
        fsdp = "fsdp._fully_shard._fsdp_param_group"
        found += [(dist.Work, "wait"), (dist, "_broadcast_coalesced")]
        found += [(_module("_functional_collectives"), "wait_tensor")]
        found += [(getattr(_module(fsdp), "FSDPParamGroup", None), "wait_for_unshard")]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def _module(name: str) -> Any:
    try:
        return import_module(f"torch.distributed.{name}")
    except ImportError:
        return None
