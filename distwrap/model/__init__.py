"""The wrapped model."""

from __future__ import annotations

from distwrap.model.transparent import TransparentModule, unwrap_model

__all__ = ["TransparentModule", "unwrap_model"]
