"""The protocol of precisions."""

from __future__ import annotations


class Precision:
    """How a wrapped model computes."""
