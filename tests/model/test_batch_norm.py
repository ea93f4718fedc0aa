"""``wrap_model(sync_batchnorm=True)`` on CPUs: BatchNorm of one process over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.model.batch_norm import CPUSyncBatchNorm
from distwrap.testing import run_ranks, simulate
from tests.slow import slow

ROWS = (5, 3, 2)  # of the batch of each rank


def net() -> nn.Sequential:
    torch.manual_seed(0)
    twice = nn.BatchNorm1d(4, momentum=None)
    layers = [nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Tanh(), twice, nn.Tanh(), twice]
    frozen = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    return nn.Sequential(*layers, nn.Sequential(frozen), nn.Flatten(), nn.Linear(24, 1)).double()


def trained(options: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    model = dw.wrap_model(net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(sum(sizes), 2, 6).double()
        own = x.split(list(sizes))[dw.rank()] if dw.world_size() > 1 else x
        optimizer.zero_grad()
        (model(own).square().sum() * dw.world_size() / len(x)).backward()
        optimizer.step()
    model.eval()
    with dw.gathered_weights(model):
        whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {**whole, "evaluated": model(x).detach()}


@pytest.mark.parametrize("strategy", ["ddp", slow("zero1", why="as ddp"), slow("fsdp", why="as ddp")])
@pytest.mark.parametrize("ranks", [2, slow(3, why="two ranks show it")])
def test_training_is_that_of_one_process(strategy: str, ranks: int) -> None:
    """Weights and running statistics are those of one process, also where ranks have unequal batches."""
    sizes = ROWS[:ranks]
    expected = trained({}, sizes)
    for found in run_ranks(trained, ranks, {"strategy": strategy, "sync_batchnorm": True}, sizes):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_without_the_word_statistics_are_a_ranks_own() -> None:
    sizes = ROWS[:2]
    expected = trained({}, sizes)
    assert not torch.allclose(run_ranks(trained, 2, {}, sizes)[0]["evaluated"], expected["evaluated"])


def test_one_process_and_what_is_left_of_a_run() -> None:
    """In one process the layers stay torch's; after a run the model computes by itself, and has the same names."""

    def wrapped() -> nn.Module:
        return dw.unwrap_model(dw.wrap_model(net(), sync_batchnorm=True))

    alone = wrapped()
    assert not any(isinstance(each, CPUSyncBatchNorm) for each in alone.modules())
    kept = simulate(wrapped, 2)[0]
    assert sum(isinstance(each, CPUSyncBatchNorm) for each in kept.modules()) == 3
    assert kept.state_dict().keys() == alone.state_dict().keys()
    x = torch.randn(4, 2, 6).double()
    assert torch.equal(kept(x), net()(x))
    assert isinstance(kept[1], nn.BatchNorm1d)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        kept[1](torch.ones(3))
