"""Peers that average with hivemind, and may come and go; the package is imported when an optimizer is wrapped."""

from distwrap.strategies.hivemind.strategy import HivemindStrategy as HivemindStrategy, global_steps as global_steps

__all__ = ["HivemindStrategy", "global_steps"]
