"""Plans of tensor parallelism for the models of tests."""

from __future__ import annotations

from torch import nn

from distwrap import FSDPStrategy


def linear_layers(name: str, module: nn.Module) -> str | None:
    """Divide each linear layer of a model by its longer side, where two ranks can."""
    if not isinstance(module, nn.Linear):
        return None
    into, out = module.in_features, module.out_features
    if into > out and into % 2 == 0:
        return "rowwise"
    return "colwise" if out % 2 == 0 else None


TP = FSDPStrategy(tensor_parallel="node", plan=linear_layers)
TWO_BY_TWO = FSDPStrategy(tensor_parallel=2, plan=linear_layers)
