"""Models that are made without numbers: they get those of one process, also where a module draws others' numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed, init_empty
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from tests.plans import TP


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Draws numbers of what is inside of it, the way of some by `.data`, and has none itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList([Part(), Part()]), nn.Linear(4, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for part in self.parts:
            part.layer.weight.data.normal_(3.0, 0.1)  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)  # type: ignore[no-any-return]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Drawing(), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))  # type: ignore[no-any-return]


MODELS: dict[str, Any] = {
    "drawn from outside": Outer,
    "drawn as a whole": Drawing,
    "torch's own": lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
}


def numbers() -> dict[str, dict[str, torch.Tensor]]:
    """Return the numbers of each model, which are trained by an optimizer that was made before."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(1)
        with init_empty():
            net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = dw.wrap_model(net)
        before = current_world().strategy.state(model, everywhere=True)
        found[name] = {key: value.clone() for key, value in before.items()}
        if name != "torch's own":
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            after = current_world().strategy.state(model, everywhere=True)
            assert any(not torch.equal(after[key], value) for key, value in found[name].items())
    with init_empty():
        half = Outer()
    half.last = nn.Linear(2, 1)
    with pytest.raises(ModelError, match="'last' with them"):
        dw.wrap_model(half)
    return found


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_numbers_are_those_of_one_process() -> None:
    """Each strategy gives an empty model the same numbers, by the reset_parameters() of whatever module draws them."""
    expected = distributed(nprocs=1, strategy="fsdp")(numbers)()
    weight = expected["drawn from outside"]["inner.parts.0.layer.weight"]
    assert float(weight.mean()) == pytest.approx(3.0, abs=0.2)
    for strategy in ("ddp", "fsdp", TP):
        found = distributed(nprocs=2, strategy=strategy)(numbers)()
        for name, state in expected.items():
            for key, value in state.items():
                assert torch.equal(found[name][key], value), (strategy, name, key)
