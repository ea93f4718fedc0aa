"""Backwards that name parameters: refused where an exchange brings the gradients, and left alone elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError

own_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # tests/house counts what is ours


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))).double()


def inputs() -> torch.Tensor:
    return torch.linspace(0, 1, 12, dtype=torch.float64).view(4, 3)


def _refused() -> None:
    model = dw.wrap_model(net())
    held = list(model.parameters())
    for use in (
        lambda loss: torch.autograd.grad(loss, held),
        lambda loss: torch.autograd.grad(loss, held, allow_unused=True),
        lambda loss: torch.autograd.grad(loss + held[0].sum(), held[:1]),
        lambda loss: loss.backward(inputs=held),
        lambda loss: torch.autograd.backward(loss, inputs=held[0]),
    ):
        loss = model(inputs()).square().mean()
        with pytest.raises(ModelError, match="names parameters"):
            use(loss)
        loss.backward()
        assert held[0].grad is not None
        model.zero_grad()


def _of_inputs() -> list[float]:
    """Return gradients of what a model is given, and of weights that a loss looks at by itself."""
    model, x = dw.wrap_model(net()), inputs().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
    penalty = torch.autograd.grad(sum(each.square().sum() for each in model.parameters()), list(model.parameters()))
    model(inputs()).square().mean().backward()
    torch.ones(1, requires_grad=True).sum().backward()
    return [float(grad.abs().sum()), *(float(each.abs().sum()) for each in penalty)]


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_gradients_by_name_are_refused_where_there_would_be_none(strategy: str) -> None:
    """Whatever way they are asked for; the loss is as good as before."""
    distributed(strategy=strategy, nprocs=2, timeout=60)(_refused)()
    assert torch.autograd._engine_run_backward is own_engine  # type: ignore[attr-defined]


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_gradients_of_inputs_and_of_penalties_are_those_of_one_process() -> None:
    """Neither goes through an exchange."""
    expected = _of_inputs()
    for found in distributed(strategy="fsdp", nprocs=2, timeout=60, returns="all")(_of_inputs)():
        assert found == pytest.approx(expected, rel=1e-9)


def _by_zero() -> list[float]:
    model = dw.wrap_model(net())
    held = list(model.parameters())
    model(inputs()).square().mean().backward(inputs=held)
    return [float(each.grad.abs().sum()) for each in held]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_by_name_are_averaged_where_autograd_brings_them(strategy: str) -> None:
    """Each rank has the same batch here, so that the average is one process's."""
    expected = _by_zero()
    for found in distributed(strategy=strategy, nprocs=2, timeout=60, returns="all")(_by_zero)():
        assert found == pytest.approx(expected, rel=1e-9)
