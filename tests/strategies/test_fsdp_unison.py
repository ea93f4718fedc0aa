"""``strategy="fsdp"``: ranks that run unlike units, or whose parameters have unlike gradients, are never mixed."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError
from distwrap.strategies.rendezvous import Foresight
from distwrap.testing import run_ranks
from tests.limits import SOON


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).tanh()  # type: ignore[no-any-return]


class Choosing(nn.Module):
    """A model that runs those of its units, and gives gradients to those of its heads, that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Expert() for _ in range(5))
        self.heads = nn.ModuleDict({name: nn.Linear(5, 1) for name in "ab"})

    def forward(self, x: torch.Tensor, units: list[int], heads: str = "ab") -> torch.Tensor:
        for number in units:
            x = self.units[number](x)
        return torch.stack([self.heads[name](x) for name in heads]).sum(0)


EVERY = [0, 1, 2, 3, 4]


def data() -> torch.Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _distance(model: nn.Module, net: nn.Module) -> float:
    from distwrap.strategies import shards

    state = shards.Divided(model, {}).state(everywhere=True)
    return max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items())


def _trained(model: Any, x: torch.Tensor) -> None:
    """Drop layers at random, alike on all ranks; use units twice, heads in turn; run two forwards for one backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chosen = torch.Generator().manual_seed(1)
    orders = [[number for number in EVERY if torch.rand((), generator=chosen) > 0.3] for _ in range(8)]
    for step, order in enumerate([EVERY, EVERY, *orders, [1, 1, 0, 1], [1, 1, 0, 1], EVERY, EVERY]):
        optimizer.zero_grad()
        loss = model(x, order, "ab" if step < 6 else "ab"[step % 2]).square().mean()
        if step % 4 == 3:
            loss = loss + model(x.flip(1), EVERY).mean()
        loss.backward()
        if step % 5 == 0:
            model(x, EVERY).square().mean().backward()
        optimizer.step()
        if step % 5 == 1:
            with torch.no_grad():
                model(x, EVERY)


def _in_unison() -> tuple[float, list[int]]:
    model, net = dw.wrap_model(Choosing().double(), strategy="fsdp"), Choosing().double()
    x = data()
    _trained(net, x)
    _trained(model, x.chunk(dw.world_size())[dw.rank()])
    far = _distance(model, net)
    asked, note = [0], Foresight.note

    def counted(self: Any, event: Any) -> None:
        asked[0] += event != self.next()
        note(self, event)

    Foresight.note = counted  # type: ignore[method-assign]
    numbers = []
    model.requires_grad_(True)
    for _ in range(4):
        asked[0] = 0
        for _ in range(2):
            model(x, EVERY).sum().backward()
        for _, _ in dw.accumulate(range(2), 2, model):
            model(x, EVERY).sum().backward()
        with torch.no_grad():
            model(x, EVERY)
        numbers.append(asked[0])
    return far, numbers


@pytest.mark.slow("waits for a limit to pass")
def test_ranks_that_change_their_order_together() -> None:
    """Layers dropped alike on all ranks, units used twice, heads in turn: the numbers are those of one process.

    An order that stays is not compared again.
    """
    for far, asked in run_ranks(_in_unison, 2):
        assert far < 1e-9
        assert asked[-2:] == [0, 0], asked


@distributed(nprocs=2, strategy="fsdp", timeout=1.5 * SOON)
def _apart(what: str, at: int) -> None:
    model = dw.wrap_model(Choosing().double())
    for step in range(4):
        odd = step == at and dw.rank() == 1
        fewer = [0, 1, 2, 3]
        orders = {"other": [0, 1, 3, 4], "order": [0, 2, 1, 3, 4], "fewer": fewer}
        units = orders.get(what, EVERY)
        if what == "alone" and odd:
            with contextlib.suppress(IndexError):
                model(data(), [0, 1, 7])
            continue
        usual = fewer if what == "joined" else EVERY  # before a collective of the loop's own
        loss = model(data(), units if odd else usual, "b" if odd and what == "heads" else "ab").sum()
        if what == "joined":
            dw.mean(float(loss.detach()))
        if what == "no backward" and odd:
            continue
        if what == "caught" and odd:
            with contextlib.suppress(IndexError):
                model(data(), [7])
        loss.backward()


WORDS = {
    "other": r"rank \d gathers 'units.[23].layer.weight'.* and rank \d gathers 'units.[23].layer.weight'",
    "order": r"gathers 'units.[12]",
    "fewer": r"units.[34]",
    "joined": r"gathers 'units.4.*and rank 0 is in mean",
    "heads": r"has no gradients of 'heads.a.weight', 'heads.a.bias'.*unused_params",
    "no backward": r"rank \d runs forward \d of Choosing with gradients",
    "caught": "forward",
    "alone": "forward",
}


@pytest.mark.parametrize(("what", "at"), [*((what, 2) for what in WORDS), ("other", 0), ("heads", 0)])
@pytest.mark.slow("waits for a limit to pass")
def test_ranks_apart_are_an_error(what: str, at: int) -> None:
    """Where a rank runs other units than the others, or in another order, all end with the names, in time."""
    began = time.monotonic()
    kind = dw.errors.DistwrapError if what in ("caught", "no backward", "alone") else ModelError
    with pytest.raises(kind, match=WORDS[what]):
        _apart(what, at)
    assert time.monotonic() - began < SOON


class Routed(nn.Module):
    """A block in which each row chooses one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(5, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (weights.argmax(-1) == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return x + out


def _experts() -> float:
    """Train experts of which each rank runs some."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.Sequential(Routed(), Routed(), Routed())).double()
    model = dw.wrap_model(copy.deepcopy(net), strategy="fsdp")
    model.set_reduce_scatter_unused_params(True)
    x = data()
    for own, rows in ((net, x), (model, x.chunk(dw.world_size())[dw.rank()])):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            own(rows + step).square().mean().backward()
            optimizer.step()
    return _distance(model, net)


def _with_zeros() -> float:
    model, net = dw.wrap_model(Choosing().double(), strategy="fsdp"), Choosing().double()
    model.set_reduce_scatter_unused_params(True)
    heads = {0: "a", 1: "ab", 2: "a", 3: "b"}
    trained = [torch.optim.AdamW(own.parameters(), lr=0.01, weight_decay=0.5) for own in (model, net)]
    for step in (0, 1, 2, 2, 3, 0):
        for optimizer in trained:
            optimizer.zero_grad()
        model(data() * (dw.rank() + 1), EVERY, heads[step if step > 1 else (dw.rank() + step) % 2]).mean().backward()
        for rank in range(2):
            (net(data() * (rank + 1), EVERY, heads[step if step > 1 else (rank + step) % 2]).mean() / 2).backward()
        for optimizer in trained:
            optimizer.step()
    return _distance(model, net)


@pytest.mark.slow("waits for a limit to pass")
def test_parameters_without_a_gradient_have_zeros() -> None:
    """Experts that some ranks run, and heads that some use, are right where the loop asks for zeros.

    What no rank uses in a step is left alone, as in one process.
    """
    assert max(run_ranks(_with_zeros, 2)) < 1e-9
    assert max(run_ranks(_experts, 2)) < 1e-9
