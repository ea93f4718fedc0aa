"""Models divided over the ranks, by torch's FSDP2; what imports much of torch is imported where a model is divided."""

from torch import nn

from distwrap.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy


def plan_of(model: nn.Module) -> str:
    """Return the table of how a model's layers are cut under tensor parallelism; empty where none is."""
    routing = model.__dict__.get("_distwrap")
    found = getattr(routing, "tensor_parallel", None)
    return "" if found is None else repr(found)
