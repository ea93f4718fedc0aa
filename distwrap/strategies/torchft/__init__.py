"""Fault tolerance in each step: if ranks are lost, the others go on, and the lost ones come back; extra ``torchft``."""

from distwrap.strategies.torchft.strategy import TorchFTStrategy

__all__ = ["TorchFTStrategy"]
