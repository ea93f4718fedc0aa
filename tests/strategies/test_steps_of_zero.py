"""Divided optimizers and what a user hangs on their steps: hooks, fp16, saves by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import CheckpointError, ModelError
from distwrap.testing import run_ranks


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def begun(strategy: str) -> tuple[Any, torch.optim.Optimizer]:
    model = dw.wrap_model(net(), strategy=strategy)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: Any) -> None:
    model(torch.ones(3, 4).double() + dw.rank()).sum().backward()


def _hooked(strategy: str, *, prepared: bool) -> None:
    model, optimizer = begun(strategy)
    if prepared:
        dw.wrap_optimizer(optimizer)
    before: list[int] = []
    after: list[list[torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: before.append(sum(each.grad is not None for each in model.parameters()))
    )
    optimizer.register_step_post_hook(lambda *_: after.append([each.detach().clone() for each in model.parameters()]))
    for _ in range(2):
        backward(model)
        optimizer.step()
        assert all(map(torch.equal, after[-1], model.parameters()))
        assert before[-1] == 4
        optimizer.zero_grad()


class Heads(nn.Module):
    """Two heads, of which a forward takes one; each is another rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(4, 2, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.get_submodule(head)(x)  # type: ignore[no-any-return]


def _left_alone() -> None:
    """What no rank uses in a step has no gradient, though it is all that a rank steps: weight decay would move it."""
    model = dw.wrap_model(Heads(), strategy="zero1", find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    for head, other in (("large", "small"), ("small", "large")):
        before = model.get_submodule(other).weight.detach().clone()
        model(torch.ones(3, 4), head).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.get_submodule(other).weight.equal(before), other


def _scaled(strategy: str) -> tuple[list[bool], list[float]]:
    """Train one weight in fp16, which one rank alone holds under zero; one share overflows in the second step."""
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(4, 1, bias=False), strategy=strategy, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = []
    for step in range(4):
        share = 1e6 if step == 1 and dw.rank() == 1 else 1.0
        dw.backward(model(torch.full((2, 4), share) / 1000).sum())
        taken.append(dw.optimizer_step(optimizer, max_norm=1.0))
        optimizer.zero_grad()
    return taken, model.weight.flatten().tolist()


def _on_steps(strategy: str) -> tuple[list[bool], list[float]]:
    for prepared in (False, True):
        _hooked(strategy, prepared=prepared)
    _left_alone()
    return _scaled(strategy)


def test_hooks_and_overflows_of_a_step() -> None:
    """Hooks see whole steps, what nobody uses stays, and an overflow is everybody's."""
    [expected, _] = run_ranks(_scaled, 2, "ddp", timeout=60)
    assert expected[0].count(False) >= 1
    assert run_ranks(_on_steps, 2, "zero1", timeout=60) == [expected] * 2


class Failing(torch.optim.SGD):
    """Raises in its second step, before it, within it or after its parent's, which has hooks like its own."""

    calls, when = 0, "before"

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2 and self.when == "before":
            raise FloatingPointError("before")
        if self.when == "parent":
            super().step(closure)
        else:
            with torch.no_grad():
                for each in self.param_groups[0]["params"]:
                    if each.grad is not None:
                        each -= self.param_groups[0]["lr"] * each.grad
        if self.calls == 2:
            raise FloatingPointError("after")


def _caught(when: str, after: str) -> list[float]:
    model = net() if dw.world_size() == 1 else dw.wrap_model(net(), strategy="zero1")
    optimizer = dw.wrap_optimizer(Failing(model.parameters(), lr=0.1), scope="element")
    optimizer.when = when
    torch.optim.SGD([torch.zeros(1)])  # from its first object on, torch runs hooks for the steps of a class
    for number in range(4):
        x = torch.tensor([[1.0], [2.0]]).double().expand(2, 4) + number
        model(x if dw.world_size() == 1 else x[dw.rank() :][:1]).mean().backward()
        try:
            optimizer.step()
        except FloatingPointError:
            if after == "again":
                optimizer.step()
            elif after == "go on":
                continue
        optimizer.zero_grad()
    return [each.sum().item() for each in model.parameters()]


@pytest.mark.parametrize(
    ("when", "after", "refused"),
    [
        ("before", "zero", ""),
        ("before", "again", ""),
        ("before", "go on", "gradients were added since"),
        ("within", "zero", "has changed weights"),
        ("parent", "zero", ""),
    ],
)
def test_a_step_that_has_raised(when: str, after: str, refused: str) -> None:
    """What it had hidden is shown, or what went on without it is refused at the next step."""
    if refused:
        with pytest.raises(ModelError, match=refused):
            run_ranks(_caught, 2, when, after)
        return
    expected = _caught(when, after)
    for found in run_ranks(_caught, 2, when, after):
        assert found == pytest.approx(expected, rel=1e-12)


def _saved_by_rank_0(folder: Path) -> None:
    model, optimizer = begun("zero1")
    backward(model)
    optimizer.step()
    if dw.rank() == 0:
        dw.save({"model": model}, folder / "model.pt", alone=True)
    for _ in range(3):
        backward(model)
        optimizer.step()
        if dw.rank() == 0:
            dw.save({"optimizer": optimizer}, folder / "optimizer.pt")


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_rank_0_may_save_the_model_alone_but_not_its_optimizer(tmp_path: Path) -> None:
    """Under zero1 each rank has all weights; what is divided is saved by all ranks, and an error says so."""
    with pytest.raises(CheckpointError, match="to which rank 1 does not come"):
        run_ranks(_saved_by_rank_0, 2, tmp_path, timeout=60)
    assert dw.load(tmp_path / "model.pt")["model"]
