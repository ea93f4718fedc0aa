"""Ways to replicate or divide a model: one protocol, one file a strategy."""

from distwrap.strategies.base import Strategy, Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.prepare import wrap_model, wrap_optimizer

__all__ = ["DDPStrategy", "Strategy", "Wrapping", "wrap_model", "wrap_optimizer"]
