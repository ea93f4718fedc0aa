"""An evaluation whose numbers the ranks have not put together is told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.group.world import current_world
from distwrap.testing import run_ranks
from tests.slow import few

DATA = TensorDataset(torch.arange(26.0).view(13, 2))


def forgotten(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    return sum(x.sum().item() for (x,) in loader) / len(DATA)


def with_gradients(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    with torch.enable_grad():
        return forgotten(loader)


def without_gradients_in_the_loop(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    total = 0.0
    with torch.enable_grad():
        for (x,) in loader:
            with torch.no_grad():
                total += x.sum().item()
    return total


def reduced(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    return dw.reduce(forgotten(loader), "sum")


def reduced_after_another_pass(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    with torch.enable_grad():
        return dw.reduce(forgotten(loader) + forgotten(loader), "sum")


def gathered(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    return sum(dw.gather(x).sum().item() for (x,) in loader) / len(DATA)


def by_torch(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    total = torch.tensor(forgotten(loader))
    torch.distributed.all_reduce(total)
    return total.item()


def on_rank_zero(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    return forgotten(loader) if dw.rank() == 0 else 0.0


def left_early(loader: DataLoader[tuple[torch.Tensor]]) -> float:
    return next(x.sum().item() for (x,) in loader)


def trains_between(evaluate: Callable[[DataLoader[tuple[torch.Tensor]]], float]) -> int:
    """Train, evaluate, train and evaluate; return how many places were told of on this rank by then."""
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = dw.shard_loader(DataLoader(DATA, batch_size=3, shuffle=True))
    validation = dw.shard_loader(DataLoader(DATA, batch_size=3))
    for _ in range(2):
        for (x,) in training:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            evaluate(validation)
    current_world().conclude()
    return sum("evaluated alone" in key for key in current_world().counts)


@pytest.mark.parametrize("evaluate", few([forgotten, on_rank_zero, with_gradients, without_gradients_in_the_loop], 2))
def test_numbers_of_one_rank_are_told_of(evaluate: Callable[[DataLoader[tuple[torch.Tensor]]], float]) -> None:
    """A sum over a rank's share that nothing adds up over the ranks is told of once, at its place."""
    assert run_ranks(trains_between, 2, evaluate)[0] == 1


@pytest.mark.parametrize("evaluate", few([reduced, reduced_after_another_pass, gathered, by_torch, left_early], 2))
def test_numbers_of_all_ranks_are_not(evaluate: Callable[[DataLoader[tuple[torch.Tensor]]], float]) -> None:
    """Ranks that exchange anything in an evaluation or after it are left alone, and so is a pass that ends early."""
    assert run_ranks(trains_between, 2, evaluate) == [0, 0]


def statistics_before(puts_together: bool) -> int:
    """Take the data's mean before there is a model, and train; return how many places were told of."""
    training = dw.shard_loader(DataLoader(DATA, batch_size=3))
    mean = torch.cat([x for (x,) in training]).mean()
    if puts_together:
        mean = dw.mean(mean)
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dw.barrier()
    for (x,) in training:
        model(x - mean).sum().backward()
        optimizer.step()
    return sum("evaluated alone" in key for key in current_world().counts)


@pytest.mark.parametrize("puts_together", [False, True])
def test_statistics_of_one_share_are_told_of(puts_together: bool) -> None:
    """What the data is normalized by is of one rank's share, though wrap_model and a barrier come after it."""
    assert run_ranks(statistics_before, 2, puts_together)[0] == (not puts_together)


def trains_by_hand() -> int:
    model = dw.wrap_model(nn.Linear(2, 1))
    for (x,) in dw.shard_loader(DataLoader(DATA, batch_size=3, shuffle=True)):
        model(x).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
    current_world().conclude()
    return sum("evaluated" in key for key in current_world().counts)


def test_training_without_an_optimizer_is_left_alone() -> None:
    """Averages of gradients are exchanges, though no optimizer steps."""
    assert run_ranks(trains_by_hand, 2) == [0, 0]


def looks_at_data() -> int:
    for _ in dw.shard_loader(DataLoader(DATA, batch_size=3)):
        pass
    current_world().conclude()
    return sum("evaluated" in key for key in current_world().counts)


def test_a_look_at_the_data_is_left_alone() -> None:
    """Without a model nobody trains or evaluates."""
    assert run_ranks(looks_at_data, 2) == [0, 0]


def counts_all(mode: Literal["auto", "exact"], samples: int) -> int:
    loader = dw.shard_loader(DataLoader(TensorDataset(torch.ones(samples)), batch_size=3, shuffle=True), mode=mode)
    with torch.no_grad():
        dw.reduce(sum(len(x) for (x,) in loader), "sum")
    return sum("evaluated twice" in key for key in current_world().counts)


@pytest.mark.parametrize(("mode", "samples", "told"), [("auto", 13, 1), ("exact", 13, 0), ("auto", 12, 0)])
def test_samples_that_come_twice_are_told_of(mode: Literal["auto", "exact"], samples: int, told: int) -> None:
    """An evaluation over a shuffled loader whose samples do not divide counts some of them twice."""
    assert run_ranks(counts_all, 2, mode, samples)[0] == told


def test_one_process_is_left_alone() -> None:
    """In one process the numbers are those of all samples."""
    assert run_ranks(trains_between, 1, forgotten) == [0]
