"""Each sample where it belongs."""

from __future__ import annotations

from distwrap.data.loader import shard_loader

__all__ = ["shard_loader"]
