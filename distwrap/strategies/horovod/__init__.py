"""Horovod's all-reduce under a hand-written loop; the package is imported where the ranks meet."""

from distwrap.strategies.horovod.strategy import HorovodStrategy as HorovodStrategy
