"""What cannot be divided is refused by name: what is divided already, sparse and doubled gradients, whole steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError
from distwrap.testing import run_ranks


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _divided_twice(strategy: str) -> None:
    first, tied = net(), net()
    tied[1].weight = first[1].weight
    model = dw.wrap_model(first)
    again: list[tuple[str, Callable[[], Any]]] = [
        ("the model itself", lambda: dw.unwrap_model(model)),
        ("0", lambda: nn.Sequential(first[0], nn.Linear(4, 4))),
        ("0", lambda: nn.Sequential(model, nn.Linear(4, 4))),
    ]
    if strategy == "fsdp":
        again.append(("1.weight", lambda: tied))
    for name, make in again:
        with pytest.raises(ModelError, match=f"'{name}' is a part of a model that wrap_model.. has divided already"):
            dw.wrap_model(make())


def _of_gradients() -> None:
    embedding = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(ModelError, match="divides gradients"):
        dw.wrap_model(embedding, strategy="fsdp")
    model = dw.wrap_model(net(), strategy="fsdp")
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(ModelError, match="create_graph="):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    for kind, words in (("LBFGS", "all parameters together"), ("Adafactor", "whole matrix"), ("Muon", "whole matrix")):
        if hasattr(torch.optim, kind):
            parameters = [parameter for parameter in model.parameters() if parameter.dim() == 2]
            with pytest.raises(ModelError, match=f"{kind} (steps|needs) .*{words}"):
                getattr(torch.optim, kind)(parameters).step(lambda: 0.0)


@pytest.mark.slow("makes many mistakes, each in a launch of its own")
def test_what_cannot_be_divided_is_refused() -> None:
    """Models divided already, sparse gradients, graphs of gradients and steps of whole matrices are errors by name."""
    run_ranks(_of_gradients, 2, timeout=60)
    for strategy in ("fsdp", "pipeline"):
        distributed(nprocs=2, strategy=strategy)(_divided_twice)(strategy)
