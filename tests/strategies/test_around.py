"""A strategy may put a module of its own around what it inherits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import distwrap as dw
from distwrap import DDPStrategy, Strategy
from distwrap.comm import traffic
from distwrap.testing import run_ranks
from tests.strategies.wrappers import Around


class AroundDDP(DDPStrategy):
    """DDP in another module."""

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return Around(super().prepare_model(model, world, wrapping))


def test_a_module_around_ddp_is_seen_through(tmp_path: Path) -> None:
    """The exchange, its traffic, the mean of replicas and a checkpoint's keys are those of the model inside."""

    def on_rank() -> None:
        net = nn.Linear(2, 1)
        model = dw.wrap_model(net, strategy=AroundDDP(), comm="local_sgd(sync_every=100)")
        assert dw.unwrap_model(model) is net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.full((1, 2), 1.0 + dw.rank())).sum().backward()
        optimizer.step()
        assert len(set(map(str, dw.gather_object(net.weight.tolist())))) == 2
        strategy = AroundDDP()
        strategy.sync_gradients(model, False)
        assert not model.net.require_backward_grad_sync  # type: ignore[union-attr]
        strategy.sync_gradients(model, True)
        dw.consolidate(model)
        dw.assert_in_sync(model)
        assert traffic(model).sent > 0
        dw.save(model, tmp_path / "a.pt")
        assert list(dw.load(tmp_path / "a.pt", into=model)) == ["weight", "bias"]

    run_ranks(on_rank, 2, timeout=60)


class TorchsDDP(DDPStrategy):
    """torch's own wrapper."""

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)


def test_torchs_own_ddp_exchanges_once_a_window() -> None:
    def on_rank() -> list[bool]:
        model = dw.wrap_model(nn.Linear(2, 1), strategy=TorchsDDP())
        return [bool(model.require_backward_grad_sync) for _ in dw.accumulate(range(4), 2, model)]

    assert run_ranks(on_rank, 2) == [[False, True] * 2] * 2


class Prefixed(Strategy):
    """A strategy whose state has names of its own."""

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return Around(model)

    def state(self, thing: Any, *, everywhere: bool = False) -> dict[str, Any]:
        return {f"module.{name}": value for name, value in thing.net.state_dict().items()}

    def load_state(self, thing: Any, state: dict[str, Any]) -> None:
        thing.loaded = list(state)


def test_a_strategy_gets_back_the_state_that_it_gave(tmp_path: Path) -> None:
    """The names that `state` returned are those that `load_state` gets; the default takes a wrapper's prefix too."""
    model = dw.wrap_model(nn.Linear(2, 1), strategy=Prefixed())
    dw.save(model, tmp_path / "a.pt")
    dw.load(tmp_path / "a.pt", into=model)
    assert model.loaded == ["module.weight", "module.bias"]
    plain = nn.Linear(2, 1)
    Strategy().load_state(plain, dw.load(tmp_path / "a.pt"))
    assert torch.equal(plain.weight, dw.unwrap_model(model).weight)
