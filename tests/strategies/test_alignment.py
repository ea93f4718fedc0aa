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


@pytest.mark.slow("waits for a limit to pass")
def test_a_rank_that_is_late_out_of_wrap_model_is_waited_for() -> None:
    """A busy machine may keep a rank in wrap_model() while another one runs its first forward."""
    first, second = run_ranks(_late, 2)
    assert first == second


def _waits_for_a_third() -> float:
    """Rank 1 waits for rank 2, which computes, and then runs its forward; rank 0 is there long before."""
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(4, 1), strategy="fsdp")
    told = torch.zeros(1)
    if dw.rank() == 1:
        torch.distributed.recv(told, 2)
    elif dw.rank() == 2:
        time.sleep(5 * alignment.ASK_SECONDS)
        torch.distributed.send(told, 1)
    with torch.no_grad():
        return float(model(torch.ones(1, 4)))


@pytest.mark.slow("waits for a limit to pass")
def test_a_rank_that_waits_for_one_that_computes_is_waited_for() -> None:
    """A rank stands in an exchange of the user's own with a third one, which is still to come to it."""
    assert len(set(run_ranks(_waits_for_a_third, 3))) == 1
