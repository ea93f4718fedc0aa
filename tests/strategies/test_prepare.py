"""What `wrap_model` and `wrap_optimizer` ask of a strategy, and what they make of its answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import Strategy
from distwrap.errors import ModelError
from distwrap.testing import run_ranks


class Around(nn.Module):
    """A wrapper that shares nothing with ours."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any) -> Any:
        return self.net(*args)


class Minimal(Strategy):
    """The least that a strategy can be."""

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return Around(model)


def test_a_strategy_that_divides_nothing_is_held_to_replicas() -> None:
    """Where a strategy does not say what is held in parts, everything must be alike on all ranks."""

    def on_rank() -> None:
        torch.manual_seed(dw.rank())
        with pytest.raises(ModelError, match=r"'net.weight' is the first that differs"):
            dw.assert_in_sync(dw.wrap_model(nn.Linear(2, 1), strategy=Minimal()))

    run_ranks(on_rank, 2)
