"""A model that nobody has wrapped, and that is stepped by hand, is refused where the ranks train it apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.model.checks.unwrapped import Unwrapped
from distwrap.testing import run_ranks
from tests.forgotten.nets import Net
from tests.slow import few

BATCHES, BATCH = 6, 8


def shares() -> Any:
    numbers = torch.randn(BATCHES * BATCH, 7, generator=torch.Generator().manual_seed(3))
    return dw.shard_loader(
        DataLoader(TensorDataset(numbers[:, :4], numbers[:, 4:]), batch_size=BATCH), batch_size="global"
    )


def train(model: nn.Module, after: Callable[[torch.Tensor], object] = lambda grad: None) -> list[float]:
    for x, y in shares():
        model.zero_grad()
        model.loss(x, y).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            after(parameter.grad)
            parameter.data -= 0.1 * parameter.grad  # which leaves no trace in its version
    return [number for parameter in model.parameters() for number in parameter.flatten().tolist()]


class Steps:
    """An optimizer that is none of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def fit(self) -> None:
        for x, y in shares():
            self.model.loss(x, y).backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                    parameter.grad = None


@pytest.mark.parametrize("fit", [train, lambda net: Steps(net).fit()], ids=["by data", "by a class"])
def test_a_forgotten_wrap_model(fit: Callable[[nn.Module], object]) -> None:
    """The error names the model's class, the other rank and the way out."""
    with pytest.raises(ModelError) as refusal:
        run_ranks(lambda: fit(Net()), 2)
    words = str(refusal.value)
    assert "the weights of Net, which wrap_model() has not wrapped, have changed, and differ from those" in words
    assert "no optimizer holds them, so the loop updates them by hand, and each of the 2 ranks trains a" in words
    assert "Write model = wrap_model(model) before the loop" in words
    assert "say model = local_model(model)." in words


def average(grad: torch.Tensor) -> None:
    if dw.world_size() > 1:
        dist.all_reduce(grad)
        grad /= dw.world_size()


RIGHT: dict[str, Callable[[], list[float]]] = {
    "wrapped": lambda: train(dw.wrap_model(Net())),
    "averaged by hand": lambda: train(Net(), average),
}


@pytest.mark.parametrize("way", few(RIGHT, 1))
def test_what_is_right_is_left_alone(way: str) -> None:
    """It ends with the weights of one process."""
    [expected] = run_ranks(RIGHT[way], 1)
    for found in run_ranks(RIGHT[way], 2):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_model_of_each_ranks_own() -> None:
    """One that `local_model` names, or that one rank alone trains, or that nobody trains, may differ."""

    def on_rank() -> bool:
        other = Net()
        other.layer.bias.data += dw.rank()  # a start of its own, which stays
        train(dw.local_model(Net()))
        alone = Net()
        for x, y in shares():
            if dw.rank() == 0:
                alone.loss(x, y).backward()
                for parameter in alone.parameters():
                    parameter.data -= 0.1  # of no use to anybody
        return other.training

    assert run_ranks(on_rank, 2) == [True, True]


def test_nothing_is_looked_at_later() -> None:
    """Once an optimizer steps, or a wrapped model was averaged, a loader gives its batches as it gives them else."""

    def on_rank() -> list[bool]:
        found = []
        for step in (False, True):
            model = dw.wrap_model(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in shares():
                model.loss(x, y).backward()
                if step:
                    optimizer.step()
            batches: Any = iter(())
            found.append(current_world().part(Unwrapped).first_batches(batches) is batches)
        return found

    assert run_ranks(on_rank, 2) == [[True, True]] * 2


def left_over() -> int:
    net: Any = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2,))
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
    if dw.rank() == 1:
        del net
    return sum(1 for _ in shares())


def test_a_part_of_a_divided_model_is_not_looked_at() -> None:
    """It may be of a run before, or on some ranks alone, and its numbers are on all of them."""
    assert run_ranks(left_over, 2, timeout=30) == [BATCHES] * 2
