"""Strategies to replicate or divide a model, and the classes that a strategy of your own needs."""

from distwrap.group.world import Layout, World
from distwrap.model.checks.in_sync import ComparedTensor, tensors_of
from distwrap.model.transparent import TransparentModule
from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.fsdp import FSDPStrategy
from distwrap.strategies.prepare import local_model, wrap_model, wrap_optimizer

__all__ = [
    "ComparedTensor",
    "DDPStrategy",
    "FSDPStrategy",
    "Layout",
    "Strategy",
    "TransparentModule",
    "World",
    "Wrapping",
    "local_model",
    "tensors_of",
    "wrap_model",
    "wrap_optimizer",
]
