"""Models divided over the ranks by torch's FSDP2. Slow imports of torch wait until a model is divided."""

from torch import nn

from distwrap.model.wrapped_models import handle_of
from distwrap.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy


def plan_of(model: nn.Module) -> str:
    """Return the table of a model's layers that tensor parallelism has divided; empty if there are none."""
    handle = handle_of(model)
    return "" if handle is None or handle.tensor_parallel is None else repr(handle.tensor_parallel)
