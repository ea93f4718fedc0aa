"""Where the ranks of a divided model are: one that is late is waited for."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.strategies import alignment
from distwrap.testing import run_ranks


def _late() -> float:
    init = alignment.Alignment.__init__

    def slow(self: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(3 * alignment.ASK_SECONDS * dw.rank())
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment.Alignment, "__init__", slow)
        torch.manual_seed(0)
        model = dw.wrap_model(nn.Linear(4, 1), strategy="fsdp")
    return float(model(torch.ones(1, 4)))


def test_a_rank_that_is_late_out_of_wrap_model_is_waited_for() -> None:
    """A busy machine may keep a rank in wrap_model() while another one runs its first forward."""
    first, second = run_ranks(_late, 2)
    assert first == second
