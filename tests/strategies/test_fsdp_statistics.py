"""What a divided model keeps beside its weights: statistics of batches, and versions of modules in a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.group.world import current_world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.norm(self.layer(x)))


class Versioned(nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(4, 4)), list[Any]()

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def statistics(model: Any) -> dict[str, torch.Tensor]:
    for step in range(3):
        model(torch.arange(24.0).view(6, 4).sin() * (step + 1)).sum().backward()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def _of_divided(folder: Path) -> None:
    expected = statistics(net())
    for checkpointing in (False, True, "selective"):
        model = dw.wrap_model(net(), strategy=FSDPStrategy(checkpointing=checkpointing), same_inputs=True)
        for name, found in statistics(model).items():
            torch.testing.assert_close(found, expected[name], msg=f"{name}, checkpointing={checkpointing}")
    own = Versioned()
    model = dw.wrap_model(own)
    model.load_state_dict(Versioned().state_dict())
    model.load_state_dict(model.state_dict())
    strategy = current_world().strategy
    strategy.load_state(model, strategy.state(model, everywhere=True))
    for io in ("auto", "sharded"):
        dw.save({"model": model}, folder / io, io=io)
        dw.load(folder / io, into={"model": model}, io=io)
    assert own.seen == [2] * 5


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_statistics_and_versions(tmp_path: Path) -> None:
    """A forward that is computed again counts its batch once, and a module learns which version wrote its state."""
    distributed(nprocs=2, strategy="fsdp")(_of_divided)(tmp_path)
