"""Models divided over the ranks, by torch's FSDP2; what imports much of torch is imported where a model is divided."""

from distwrap.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy
