"""Precisions: one class each, and what scaled losses need in a run."""

from distwrap.precision.base import Precision
from distwrap.precision.in_precision import InPrecision, autocast
from distwrap.precision.loss_scaling import LossScaling

__all__ = ["InPrecision", "LossScaling", "Precision", "autocast"]
