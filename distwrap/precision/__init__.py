"""Precisions: one class each, and what scaled losses need in a run."""

from distwrap.precision.loss_scaling import LossScaling
from distwrap.precision.precisions import InPrecision, Precision, autocast

__all__ = ["InPrecision", "LossScaling", "Precision", "autocast"]
