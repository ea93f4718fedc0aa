"""Fault tolerance a step: ranks may be lost, the others go on, and the lost ones come back; the extra ``torchft``."""

from distwrap.strategies.torchft.strategy import TorchFTStrategy

__all__ = ["TorchFTStrategy"]
