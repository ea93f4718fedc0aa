"""Optimizers and scalers that the caller made train in ranks that are copies of its process too."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.group.world import current_world
from distwrap.launch import fork_safety
from distwrap.live_objects import instances
from distwrap.precision import LossScaling
from distwrap.testing import run_ranks


class LocalError(Exception):
    """One of this module's."""


@pytest.mark.slow("imports torch's compiler in each rank")
def test_what_the_caller_has_made_is_found_in_a_forked_rank() -> None:
    """An optimizer that the caller made goes on with the divided parameters, and its scaler is seen."""
    if fork_safety.refusal():
        pytest.skip("a thread of another test's")

    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))

    @distributed(nprocs=2, launcher="fork", strategy="fsdp")
    def trained() -> tuple[float, bool]:
        model = dw.wrap_model(net)
        seen = current_world().part(LossScaling).sees_users_scaler()
        before = model.weight.detach().full_tensor()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return float((model.weight.detach().full_tensor() - before).abs().max()), seen

    assert trained() == (pytest.approx(0.1), True)

    @distributed(nprocs=2, launcher="fork", strategy="fsdp")
    def raises() -> None:
        dw.wrap_model(net)

        class Later(LocalError):
            pass

        raise LocalError if dw.rank() == 0 else Later

    with pytest.raises(LocalError):
        raises()


def _found_in_a_served_rank() -> list[list[str]]:
    optimizer, found = torch.optim.SGD([torch.zeros(1)], lr=0.1), []
    for look_again in (True, False):
        found.append(["mine" if one is optimizer else repr(one) for one in instances(torch.optim.Optimizer)])
        if look_again:
            gc.freeze()
    return found


def test_what_a_rank_of_the_fork_server_has_made_is_found() -> None:
    """Also where the user has told the collector to leave it out, as the server did with its own objects."""
    (found,) = run_ranks(_found_in_a_served_rank, 1)
    assert ["mine" in ones for ones in found] == [True, True], found
