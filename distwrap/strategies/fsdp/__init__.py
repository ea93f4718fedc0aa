"""Models divided over the ranks by torch's FSDP2. Slow imports of torch wait until a model is divided."""

from torch import nn

from distwrap.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy


def plan_of(model: nn.Module) -> str:
    """Return the table of a model's layers that tensor parallelism has divided; empty if there are none."""
    routing = model.__dict__.get("_distwrap")
    found = getattr(routing, "tensor_parallel", None)
    return "" if found is None else repr(found)
