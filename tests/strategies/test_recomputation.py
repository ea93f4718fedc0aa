"""``FSDPStrategy(checkpointing=…)``: gradients are those of a forward whose activations are kept; or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy
from distwrap.errors import ModelError
from distwrap.testing import simulate
from tests.slow import slow


class Block(nn.Module):
    """A block that changes buffers in its forward, draws, or keeps nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(6, 6)
        if kind == "spectral":
            nn.utils.parametrizations.spectral_norm(self.layer)
        if kind == "gru":
            self.layer = nn.GRUCell(6, 6)  # type: ignore[assignment]
        self.dropout = nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.norm = nn.BatchNorm1d(6) if kind == "batch norm" else nn.Identity()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gru":
            return self.layer(x, torch.tanh(x))  # type: ignore[no-any-return]
        if self.kind == "in place":
            self.scale.mul_(0.5).add_(0.5 * x.detach().abs().mean())
        if self.kind == "set":
            self.scale = 0.5 * self.scale + 0.5 * x.detach().abs().mean()
        return x + self.dropout(self.norm(self.layer(x / self.scale)).tanh())  # type: ignore[no-any-return]


def _trained(kind: str, twice: bool) -> list[list[float]]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(Block(kind) for _ in range(3))).double()
    options = {"same_inputs": True} if dw.world_size() > 1 else {}
    model, losses = dw.wrap_model(net, **options), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        torch.manual_seed(step)  # as ranks draw alike
        output = model(x)
        loss = (output - x.flip(1)).square().mean()
        loss.backward(retain_graph=twice)
        if twice:
            output.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return [losses, [float(each.double().sum()) for each in model.buffers()]]


@pytest.mark.parametrize(
    "kind",
    ["batch norm", *(slow(each, why="batch norm shows it") for each in ("", "dropout", "spectral", "in place", "set"))],
)
def test_blocks_that_change_buffers_have_the_gradients_of_their_forward(kind: str) -> None:
    """Losses and buffers of four steps, also with two backwards through one graph."""
    for twice in (False, True):
        wanted = simulate(_trained, 1, kind, twice)[0]
        modes: tuple[Any, ...] = (False, True) if twice else (False, True, "selective")
        for mode in modes:
            strategy = FSDPStrategy(checkpointing=mode)
            for found in simulate(_trained, 2, kind, twice, strategy=strategy):
                for own, other in zip(wanted, found, strict=True):
                    assert own == pytest.approx(other, abs=1e-9), mode


def test_recurrent_layers_are_not_recomputed_selectively() -> None:
    """torch changes the products that are kept in place, and does not notice."""
    with pytest.raises(ModelError, match="'layer', a GRUCell"):
        simulate(_trained, 2, "gru", False, strategy=FSDPStrategy(checkpointing="selective"))


def _types() -> list[float]:
    net = nn.Sequential(*(Block("spectral") for _ in range(3)))
    with pytest.raises(ModelError, match=r"'0.layer' has a parametrization with buffers"):
        dw.wrap_model(net, precision="bf16")
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Sequential(*(Block("") for _ in range(3))))
    model(torch.ones(2, 6)).sum().backward()
    return [float(each.grad.norm().item()) for each in model.parameters()]


def test_offloading_on_the_cpu_changes_nothing_and_two_types_are_refused() -> None:
    """Before the first step."""
    offloaded = simulate(_types, 2, strategy=FSDPStrategy(cpu_offload=True))
    assert offloaded == simulate(_types, 2, strategy="fsdp")
