"""How a model is replicated: one protocol, one file a strategy."""

from __future__ import annotations

from distwrap.strategies.prepare import STRATEGIES, wrap_model, wrap_optimizer

__all__ = ["STRATEGIES", "wrap_model", "wrap_optimizer"]
