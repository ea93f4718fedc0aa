"""Peers that average with hivemind, and may come and go; the package is imported when a model is wrapped."""

from distwrap.strategies.hivemind.optimizer import global_steps as global_steps
from distwrap.strategies.hivemind.strategy import HivemindStrategy as HivemindStrategy

__all__ = ["HivemindStrategy", "global_steps"]
