"""The wrapped model."""

from distwrap.model.buffers import sync_buffers
from distwrap.model.checks.in_sync import assert_in_sync
from distwrap.model.transparent import TransparentModule, unwrap_model

__all__ = ["TransparentModule", "assert_in_sync", "sync_buffers", "unwrap_model"]
