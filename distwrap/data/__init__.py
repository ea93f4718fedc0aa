"""The data: each rank's share of a loader, and steps that all ranks take together."""

from distwrap.data.loader import shard_loader
from distwrap.data.lockstep import Lockstep, lockstep
from distwrap.data.preemption import Preemption
from distwrap.data.sharded import ShardedLoader

__all__ = ["Lockstep", "Preemption", "ShardedLoader", "lockstep", "shard_loader"]
