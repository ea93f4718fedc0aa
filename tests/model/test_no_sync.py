"""Gradients that `no_sync` leaves on their rank are averaged once, as those of one big batch in one process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError, OptionError
from distwrap.testing import run_ranks

STEPS, EVERY = 7, 3  # so that the last window is short


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def batches() -> torch.Tensor:
    return torch.randn(STEPS, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(in_one_line: bool) -> tuple[list[float], list[bool]]:
    """Train by a loop that steps after every third batch, and after the last."""
    model = dw.wrap_model(network())
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model)
    share, alike = 6 // dw.world_size(), []
    for number, whole in enumerate(batches(), 1):
        x = whole[dw.rank() * share :][:share]
        steps_now = number % EVERY == 0 or number == STEPS
        no_sync: AbstractContextManager[None] = nullcontext()
        if in_one_line or not steps_now:
            no_sync = dw.no_sync(model, enabled=not steps_now)
        with no_sync:
            (model(x).pow(2).mean() / EVERY).backward()
        if steps_now:
            optimizer.step()
            optimizer.zero_grad()
        elif not hasattr(next(iter(model.parameters())), "full_tensor"):
            own = next(p.grad for p in model.parameters() if p.grad is not None)
            alike.append(all(torch.equal(own, other) for other in dw.gather_object(own)))
    return _weights(model), alike


def _weights(model: nn.Module) -> list[float]:
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def in_one_process() -> list[float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for number, x in enumerate(batches(), 1):
        (model(x).pow(2).mean() / EVERY).backward()
        if number % EVERY == 0 or number == STEPS:
            optimizer.step()
            optimizer.zero_grad()
    return _weights(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_loop_by_modulo_trains_as_one_process(strategy: str) -> None:
    """The weights are those of one process; the gradients are each rank's own in between, where each has them whole."""
    train = distributed(nprocs=2, launcher="forkserver", strategy=strategy, returns="all", timeout=60)(trained)
    for in_one_line in (True, False):
        for weights, alike in train(in_one_line):
            assert weights == pytest.approx(in_one_process(), rel=0, abs=1e-12)
            assert not any(alike)
            assert len(alike) == (0 if strategy == "fsdp" else 4)


@pytest.mark.parametrize("comm", ["local_sgd(sync_every=1)", "decentralized", "diloco(sync_every=2)"])
def test_where_nobody_averages_gradients(comm: str) -> None:
    """A loop by modulo trains under algorithms of weights too: where all ranks have one batch, as one process does."""

    def on_rank() -> list[float]:
        model = dw.wrap_model(network(), comm=comm, same_inputs=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for number, x in enumerate(batches(), 1):
            steps_now = number % EVERY == 0 or number == STEPS
            with dw.no_sync(model, enabled=not steps_now):
                (model(x).pow(2).mean() / EVERY).backward()
            if steps_now:
                optimizer.step()
                optimizer.zero_grad()
        return _weights(model)

    expected = in_one_process()
    for weights in run_ranks(on_rank, 2):
        if not comm.startswith("diloco"):  # whose outer optimizer has a momentum of its own
            assert weights == pytest.approx(expected, rel=0, abs=1e-12)


def test_in_a_single_process_it_changes_nothing() -> None:
    """Alone the loop is the plain one."""
    assert trained(in_one_line=True)[0] == in_one_process()


def test_a_static_graph_may_accumulate() -> None:
    """torch has to see two steps of a static graph before an exchange can be left out."""

    def on_rank() -> list[float]:
        model = dw.wrap_model(network(), static_graph=True)
        for x in batches()[:, dw.rank() * 3 :][:, :3]:
            with dw.no_sync(model):
                model(x).pow(2).mean().backward()
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]

    model = network()
    for x in batches():
        model(x).pow(2).mean().backward()
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    for found in run_ranks(on_rank, 2):
        for mine, parameter in zip(found, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert mine == pytest.approx(parameter.grad.flatten().tolist(), rel=0, abs=1e-12)


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def _summed_by_a_method() -> list[float]:
    model: Any = dw.wrap_model(Direct())
    x = torch.arange(1.0, 4.0, dtype=torch.float64) * (1 + dw.rank())
    with dw.no_sync(model):
        model.loss(x).backward()
    model.loss(x * x).backward()
    return model.w.grad.tolist()  # type: ignore[no-any-return]


def test_a_method_that_calls_no_module() -> None:
    """Its backward outside of no_sync() averages, though the one before was inside."""
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    mean = sum((1 + rank) * x + ((1 + rank) * x) ** 2 for rank in range(2)) / 2
    assert run_ranks(_summed_by_a_method, 2) == [mean.tolist()] * 2  # type: ignore[union-attr]


def test_a_step_over_gradients_of_one_rank_is_refused() -> None:
    """Inside, and after a last batch that was left out; another model's optimizer may step, and a right loop."""

    def on_rank() -> None:
        model, other = dw.wrap_model(network()), dw.wrap_model(network())
        optimizer, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
        x = torch.ones(1, 4, dtype=torch.float64)
        with dw.no_sync([model]):
            model(x).sum().backward()
            with pytest.raises(ModelError, match=r"no_sync\(\): its gradients"):
                optimizer.step()
            other(x).sum().backward()
            others.step()
            with dw.no_sync(model):
                model(x).sum().backward()
            model(x * (dw.rank() + 1)).sum().backward()  # of which the inner one was not the end
        grads = dw.gather_object(next(p.grad for p in model.parameters() if p.grad is not None))
        assert dw.world_size() == 1 or not torch.equal(*grads)
        if dw.world_size() > 1:
            with pytest.raises(ModelError, match="after a backward"):
                dw.optimizer_step(optimizer)
        model(x).sum().backward()
        assert dw.optimizer_step(optimizer)
        dw.assert_in_sync(model)

    run_ranks(on_rank, 2)
    run_ranks(on_rank, 1)


def test_what_does_not_go_with_it_is_refused() -> None:
    """A loop of accumulate() leaves exchanges out by itself; and it takes models."""

    def on_rank() -> None:
        model = dw.wrap_model(network())
        for _ in dw.accumulate([1, 2], 2, model):
            with pytest.raises(ModelError, match="in a loop of accumulate"), dw.no_sync(model):
                pass
        thing: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(OptionError, match="not a SGD"):
            dw.no_sync([thing]).__enter__()

    run_ranks(on_rank, 2)
