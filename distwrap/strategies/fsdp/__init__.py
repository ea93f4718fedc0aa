"""Models divided over the ranks, by torch's FSDP2; what imports much of torch is imported where a model is divided."""

from typing import Any

from distwrap.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy


def hsdp(**options: Any) -> FSDPStrategy:
    """Return a strategy that divides a model over the ranks of a node, each of which holds a copy."""
    return FSDPStrategy(**{"shard": "node", **options})
