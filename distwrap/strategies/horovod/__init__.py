"""Horovod's all-reduce for a hand-written loop; the package is imported when the ranks meet."""

from distwrap.strategies.horovod.strategy import HorovodStrategy as HorovodStrategy
