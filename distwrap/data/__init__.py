"""The data: each rank's share of a loader, and steps that all ranks take together."""

from distwrap.data.loader import shard_loader
from distwrap.data.lockstep import Lockstep, lockstep
from distwrap.data.preemption import Preemption

__all__ = ["Lockstep", "Preemption", "lockstep", "shard_loader"]
