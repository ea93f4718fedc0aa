"""Behaviours of a strategy by theme; importing this package fills their table."""

from distwrap.testing.behaviours import checkpoints, gradients, layout, models, optimizers, precisions, runs, training
from distwrap.testing.behaviours.base import BEHAVIOURS

__all__ = ["BEHAVIOURS", "checkpoints", "gradients", "layout", "models", "optimizers", "precisions", "runs", "training"]
