"""The metric of an evaluation over N ranks is the one of a single process, to the last digit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distwrap import gather, mean, shard_loader, wrap_model
from distwrap.testing import run_ranks
from tests.slow import few

CASES = list(itertools.product([1, 2, 3, 7, 20, 41], [1, 4, 6]))  # n, batch size


class Net(nn.Module):
    """With BatchNorm, whose evaluation must not touch its statistics, nor wait for another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def evaluate(cases: list[tuple[int, int]], num_workers: int, bn_is_trained: bool) -> list[Any]:
    """Accuracy as a count, the mean loss, and the sorted losses, for each case."""
    torch.manual_seed(0)
    data, labels = torch.randn(41, 8), torch.randint(3, (41,))
    net = Net()
    if bn_is_trained:
        net.layers[1].running_mean.copy_(torch.linspace(-1, 1, 16))  # type: ignore[operator, union-attr]
        net.layers[1].running_var.copy_(torch.linspace(0.5, 2, 16))  # type: ignore[operator, union-attr]
    model = wrap_model(net)
    model.eval()
    told = []
    for n, batch_size in cases:
        rows = TensorDataset(data[:n], labels[:n])
        loader = shard_loader(DataLoader(rows, batch_size=batch_size, num_workers=num_workers))
        losses, right, count = [torch.zeros(0, dtype=torch.float64)], 0, 0
        with torch.no_grad():
            for x, y in loader:
                # Row by row: a sum over a batch of another size may differ in the last digit, wherever it is computed.
                logits = torch.cat([model(row[None]) for row in x])
                losses.append(nn.functional.cross_entropy(logits.double(), y, reduction="none"))
                right += int((logits.argmax(1) == y).sum())
                count += len(y)
        mine = torch.cat(losses)
        whole = gather(mine).sort().values
        accuracy = mean(float(right) / count if count else 0.0, count)
        assert whole.numel() == n
        told.append((round(float(accuracy) * n), float(whole.mean()), whole.tolist()))
    return told


@pytest.mark.parametrize("bn_is_trained", [False, True])
@pytest.mark.parametrize("world_size", few([2, 3, 4], 1))
def test_the_metric_is_one_processs(world_size: int, bn_is_trained: bool) -> None:
    """For any n, batch size and number of ranks, also with fewer samples than ranks."""
    expected = evaluate(CASES, 0, bn_is_trained)
    assert run_ranks(evaluate, world_size, CASES, 0, bn_is_trained, timeout=60) == [expected] * world_size


def test_with_workers() -> None:
    """And with loader workers."""
    assert run_ranks(evaluate, 2, CASES[-2:], 1, False, timeout=60) == [evaluate(CASES[-2:], 0, False)] * 2
