"""The process group and this process's place in it."""

from __future__ import annotations

from distwrap.group.setup import setup_process_group, teardown_process_group
from distwrap.group.world import (
    current_world,
    device,
    is_rank_zero,
    local_rank,
    local_world_size,
    node_rank,
    placement,
    rank,
    world_size,
)

__all__ = [
    "current_world",
    "device",
    "is_rank_zero",
    "local_rank",
    "local_world_size",
    "node_rank",
    "placement",
    "rank",
    "setup_process_group",
    "teardown_process_group",
    "world_size",
]
