"""Check of a plan of tensor parallelism on simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distwrap.strategies.fsdp import FSDPStrategy, plan_of
from distwrap.strategies.prepare import wrap_model
from distwrap.testing.ranks import simulate


def check_plan(model: nn.Module, plan: Any, *batch: Any, nprocs: int = 2) -> str:
    """Compare each block that a plan divides with its whole self, in a forward of one batch on simulated ranks.

    Args:
        model: the whole model; it stays as it is.
        plan: as of ``FSDPStrategy(plan=…)``.
        *batch: the arguments of the model's forward.
        nprocs: the number of ranks that divide each layer.

    Returns:
        A table of the division.

    Raises:
        ModelError: the plan does not fit the model, or a block computes something else; the message names it.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> print(check_plan(net, {"0": "colwise", "2": "rowwise"}, torch.ones(2, 4)))
        modules  class   divided  whole     on a rank
        *        Linear  colwise  8 x 4, 8  4 x 4, 4
        *        Linear  rowwise  4 x 8, 4  4 x 4, 4
    """

    def on_rank(model: nn.Module, batch: tuple[Any, ...]) -> str:
        wrapped = wrap_model(model)
        with torch.no_grad():
            wrapped(*batch)
        return plan_of(wrapped)

    strategy = FSDPStrategy(tensor_parallel=nprocs, plan=plan, check=True)
    return simulate(on_rank, nprocs, model, batch, strategy=strategy)[0]
