"""Optimizers are divided by what their step of one number looks at, which is known of the class, or said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError, OptionError
from distwrap.strategies.optimizer_scope import refuse_scope, scope_of


class Plain(torch.optim.Optimizer):
    """Sign descent with a rate that falls with a count of its own, which is no part of its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                        p.sub_(group["lr"] / self.calls * p.grad.sign())


class Warm(torch.optim.AdamW):
    """One of torch's with options of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, betas=(0.5, 0.9))


class Clipping(torch.optim.AdamW):
    """One of torch's whose step calls something of its own."""

    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)  # type: ignore[misc]


class Stepping(torch.optim.SGD):
    """One of torch's with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3))


def test_all_of_torchs_are_known() -> None:
    """Also those that a newer torch has: one that is not in the table would be refused."""
    kinds = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert len(kinds) >= 14
    assert {kind.__name__ for kind in kinds if scope_of(kind([weight()], lr=0.1)) is None} == set()


def test_a_subclass_is_known_while_it_steps_by_its_parents_step() -> None:
    assert scope_of(Warm([weight()])) == "element"
    assert scope_of(Stepping([weight()], lr=0.1)) is None
    assert scope_of(Clipping([weight()], lr=0.1)) is None
    assert scope_of(dw.wrap_optimizer(Stepping([weight()], lr=0.1), scope="element")) == "element"


@pytest.mark.parametrize(
    ("scope", "takes", "message"),
    [
        (
            None,
            ("element", "parameter"),
            r"what a step of Plain looks at is not known.*scope='element'.*'ddp' or 'fsdp'",
        ),
        ("all", ("element", "parameter"), r"Plain steps by all parameters at once.*max_norm=.*'ddp' or 'fsdp'"),
        ("parameter", ("element",), r"Plain steps by a weight as a whole.*'zero1' or 'ddp'"),
    ],
)
def test_what_cannot_be_divided_is_refused(scope: Any, takes: Any, message: str) -> None:
    """The error has the word to say, or the strategies that accept it."""
    optimizer = dw.wrap_optimizer(Plain([weight()]), scope=scope)
    with pytest.raises(ModelError, match=message):
        refuse_scope(optimizer, takes)


def test_another_word_is_refused() -> None:
    with pytest.raises(OptionError, match=r"scope='elements'.*'parameter'"):
        dw.wrap_optimizer(Plain([weight()]), scope="elements")  # type: ignore[arg-type]


def _trained(strategy: str | None, kind: Any, scope: Any) -> tuple[list[float], int]:
    """Return the weights after four steps, and how often the optimizer was asked to step."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))).double()
    model = net if strategy is None else dw.wrap_model(net)
    optimizer = kind(model.parameters())
    if strategy is not None and scope:
        dw.wrap_optimizer(optimizer, scope=scope)
    for number in range(4):
        x = torch.full((4, 3), 1.0 + number, dtype=torch.float64)
        if strategy == "pipeline":
            loss = (model(x) - 1).square().mean()
        else:
            loss = (model(x[dw.rank() :: dw.world_size()]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [] if strategy == "pipeline" else [each.sum().item() for each in net.parameters()]
    return weights, getattr(optimizer, "calls", 4)


def test_one_that_counts_its_steps_trains_as_in_one_process_once_it_is_said() -> None:
    """Nothing is tried: its step runs as often as the loop calls it."""
    expected = _trained(None, Plain, None)
    found = distributed(strategy="zero1", nprocs=2, returns="all")(_trained)("zero1", Plain, "element")
    assert found == [(pytest.approx(expected[0], rel=1e-12), 4)] * 2


@pytest.mark.parametrize("strategy", ["zero1", "pipeline"])
def test_one_that_nobody_knows_is_refused_at_its_first_step(strategy: str) -> None:
    """Also where nobody has prepared it; and one with torch's own step is not."""
    run = distributed(strategy=strategy, nprocs=2, timeout=60)(_trained)
    run(strategy, Warm, None)
    with pytest.raises(ModelError, match="what a step of Plain looks at is not known"):
        run(strategy, Plain, None)
