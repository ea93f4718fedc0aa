"""Private names of torch's process groups.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]


def default_store() -> Store | None:
    """Return the store in which the ranks of the process group met, or ``None`` if torch does not tell.

    Relies on ``torch.distributed.distributed_c10d:_get_default_store``.
    Without it: in a group that the user made nobody notices that a rank saves alone without the word.
    """
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if found is None else found()


def collectives_begun(group: dist.ProcessGroup | None = None) -> int | None:
    """Return how many collectives this rank has begun in the group of all ranks, and in another one.

    Relies on ``torch.distributed:ProcessGroup._get_sequence_number_for_group``.
    Without it: fit_batch_size tries again although ranks have begun different numbers of collectives, and gradients
    count as averaged by hand if they are equal on all ranks.

    Returns:
        The number; ``None`` without groups, or if a backend does not tell.
    """
    groups = {id(each): each for each in (dist.group.WORLD, group) if each is not None}
    counts = [getattr(each, "_get_sequence_number_for_group", None) for each in groups.values()]
    with suppress(RuntimeError):  # a backend that does not count
        return sum(int(count()) for count in counts if count is not None) if any(counts) else None
    return None


def waits_for_ranks() -> list[tuple[Any, str]]:
    """Return owners and names of torch's internal functions that wait for other ranks.

    Relies on ``torch.distributed:_broadcast_coalesced``, ``torch.distributed._functional_collectives:wait_tensor``,
    ``torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard``.
    Without it: a report counts such waits as part of the forward or backward.
    """
    found: list[tuple[Any, str]] = [(torch.futures.Future, "wait")]
    if dist.is_available():
        found += [(dist.Work, "wait"), (dist, "_broadcast_coalesced")]
        units = getattr(_module("fsdp._fully_shard._fsdp_param_group"), "FSDPParamGroup", None)
        found += [(_module("_functional_collectives"), "wait_tensor"), (units, "wait_for_unshard")]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def _module(name: str) -> Any:
    try:
        return import_module(f"torch.distributed.{name}")
    except ImportError:
        return None
