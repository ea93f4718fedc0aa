"""Models in groups of ranks under torch.compile: the numbers of one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from tests.plans import TP


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(2))
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def trained(dropout: float = 0.0, backend: str = "eager") -> list[float]:
    """Return the losses of a compiled model."""
    model = dw.wrap_model(Net(dropout).double())
    compiled = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(3):
        x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dynamo's own, which looks at .grad of what is cut
            loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow("compiles a model")
def test_a_compiled_model_in_a_group_trains_as_in_one_process() -> None:
    """Blocks are compiled as they are cut, but for their proof."""
    expected = trained()
    for losses in distributed(strategy=TP, nprocs=2, returns="all", timeout=120)(trained)():
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow("compiles a model")
def test_pieces_draw_each_their_own_dropout_where_a_model_is_compiled() -> None:
    """Compiled blocks would draw one mask of dropout on all ranks, for other pieces on each."""
    train = distributed(strategy=TP, nprocs=2, timeout=120, seed=0)(trained)
    assert train(0.5) == train(0.5, backend="")
