"""Steps of optimizers whose class calls the step of its parent: torch runs all hooks for both, and it is one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.group.optimizer_steps import OptimizerSteps, Phase
from distwrap.group.world import current_world
from distwrap.testing import run_ranks


class Clamped(torch.optim.SGD):
    """Steps twice by its parent's step, looks at the weights after each, and clamps them at the end."""

    seen = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        weights = self.param_groups[0]["params"]
        self.seen = 0.0
        for _ in range(2):
            loss = super().step(closure)
            self.seen += _sum(weights)
        for weight in weights:
            weight.clamp_(-0.45, 0.45)
        return loss


class Again(torch.optim.SGD):
    """Takes its first step of all twice, by the same method."""

    seen, takes_more = 0.0, True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.takes_more:
            self.takes_more = False
            self.step()
        return super().step(closure)


def trained(strategy: str, kind: Any = Clamped, *, closure: bool = False, rank: int | None = None) -> list[float]:
    """Return sums of a model's weights and gradients after each of three steps, and what the step saw."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # from now on torch runs hooks around the parent's step too
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    if rank is not None:
        model = dw.wrap_model(model, strategy=strategy)
    optimizer = dw.wrap_optimizer(kind(model.parameters(), lr=0.1, momentum=0.9), scope="element")
    batch = torch.randn(4, 4, dtype=torch.float64)[slice(None) if rank is None else slice(rank, None, 2)]

    def loss() -> torch.Tensor:
        with torch.enable_grad():
            result: torch.Tensor = model(batch).square().mean()
            optimizer.zero_grad()
            result.backward()
        return result

    sums = []
    for _ in range(3):
        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
        sums += [optimizer.seen, _sum(model.parameters()), _sum(each.grad for each in model.parameters())]
    return sums


def _sum(tensors: Iterable[Any]) -> float:
    """Return the sum of the magnitudes in tensors, of which ranks may have parts; ``None`` is nothing."""
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors if each is not None]
    return sum(each.detach().abs().sum().item() for each in whole)


@pytest.mark.parametrize(("strategy", "closure"), [("ddp", True), ("zero1", False), ("fsdp", False)])
def test_a_step_within_a_step_computes_what_one_process_does(strategy: str, closure: bool) -> None:
    """Its own code sees the new weights of all ranks, and no gradient is lost."""
    expected = trained(strategy, closure=closure)
    for found in run_ranks(lambda: trained(strategy, closure=closure, rank=dw.rank()), 2):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_step_that_calls_itself() -> None:
    expected = trained("zero1", Again)
    for found in run_ranks(lambda: trained("zero1", Again, rank=dw.rank()), 2):
        assert found == pytest.approx(expected, rel=1e-12)


def _compiled() -> float:
    model = dw.wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3) * (1 + dw.rank())).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    return float(model.weight.sum())


@pytest.mark.slow("torch's compiler")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step() -> None:
    """Of a class that torch hooks itself, since no instance of its parent was made before."""
    assert len(set(run_ranks(_compiled, 2, timeout=120))) == 1


def _phases() -> tuple[Counter[str], list[str]]:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    counts: Counter[str] = Counter()
    order = []
    for phase in Phase:

        def listener(*_: Any, name: str) -> None:
            counts[name] += 1
            if name in ("HIDE", "SHOW"):
                order.append(name)

        current_world().part(OptimizerSteps).listen(phase, partial(listener, name=phase.name))
    optimizer = Clamped([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    counts.clear()
    order.clear()
    optimizer.step()
    return counts, order


def test_phases_come_once_a_step() -> None:
    """What is hidden is shown after each step of the parent, and hidden for the next, also after a step that failed."""
    counts, order = run_ranks(_phases, 1)[0]
    assert order == ["HIDE", "SHOW"] * 2
    assert {name: count for name, count in counts.items() if name not in ("HIDE", "SHOW")} == {
        phase.name: 1 for phase in Phase if phase not in (Phase.HIDE, Phase.SHOW)
    }
