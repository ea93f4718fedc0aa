"""All behaviours: importing the files of the themes fills the table."""

from tests.conformance import checkpoints, gradients, layout, models, optimizers, precisions, runs, training
from tests.conformance.base import BEHAVIOURS, LAUNCHING

__all__ = ["ALL", "checkpoints", "gradients", "layout", "models", "optimizers", "precisions", "runs", "training"]

ALL = frozenset({*BEHAVIOURS, *LAUNCHING})
