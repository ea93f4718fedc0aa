"""A strategy that shares no code with ours is asked for everything that helpers of a hand-written loop do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap import DDPStrategy, Placement, rank
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import Layout, World, current_world
from distwrap.options import Options
from tests.interpreters import run_python
from tests.strategies.by_hand import ByHand

EXAMPLES = 24


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(EXAMPLES, 1, dtype=torch.float64, generator=generator))


def prepared(*, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = dw.wrap_model(nn.Linear(4, 1, dtype=torch.float64))
    return model, dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def trained(batch_size: int) -> list[float]:
    """Train three epochs; the global batch is 8."""
    model, optimizer = prepared()
    loader = dw.shard_loader(DataLoader(examples(), batch_size=batch_size))
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            dw.backward((model(x) - y).square().mean())
            optimizer.step()
    return weights(model)


def accumulated(batch_size: int) -> list[float]:
    """Train by sums over uneven windows of micro-batches."""
    model, optimizer = prepared(lr=0.02)
    loader = dw.shard_loader(DataLoader(examples(), batch_size=batch_size))
    for (x, y), window in dw.accumulate(loader, 2, model):
        losses = (model(x) - y).square()
        dw.backward(dw.scale_loss(losses.sum(), losses.numel()))
        if window.last:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@dw.distributed(nprocs=4, strategy=ByHand(), returns="all")
def everything(folder: Path) -> dict[str, Any]:
    strategy: Any = current_world().options.strategy
    loader = dw.shard_loader(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
    found: dict[str, Any] = {
        "share": [x.tolist() for (x,) in loader],
        "gathered": dw.gather(torch.tensor([rank()])).tolist(),
        "mean": dw.mean(float(rank()), count=1 + rank() // 2),
        "sum": dw.reduce(rank(), "sum"),
        "everybody": dw.gather_object(rank()),
        "trained": trained(4),
    }
    strategy.models.clear()
    found["accumulated"] = accumulated(4)
    strategy.models.clear()
    model, optimizer = prepared()
    strategy.asked.clear()
    taken = []
    for _ in range(3):
        dw.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
        taken.append(dw.optimizer_step(optimizer, max_norm=1.0))
    found["taken"], found["asked"] = taken, list(strategy.asked)
    strategy.asked.clear()
    dw.save({"model": model, "optimizer": optimizer, "weights": weights(model)}, folder / "state.pt")
    dw.load(folder / "state.pt", into={"model": model, "optimizer": optimizer})
    found["state"] = list(strategy.asked)
    dw.assert_in_sync(model)
    with torch.no_grad():
        next(model.parameters()).add_(rank() % 2)
    strategy.parts_differ = True
    dw.assert_in_sync(model)  # unequal parts are not compared
    strategy.parts_differ = False
    with pytest.raises(ModelError, match=r"'weight' .*ranks 0, 2 .* ranks 1, 3 "):
        dw.assert_in_sync(model)
    strategy.parts_differ = True
    with torch.no_grad():
        next(model.parameters()).add_(rank() == 3)
    with pytest.raises(ModelError, match=r"'weight' \(half 1\) .*rank 1 .* rank 3 "):
        dw.assert_in_sync(model)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("by_hand")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    found: Any = everything(folder)
    return list(found)


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_shares_go_by_the_strategys_layout(ranks: list[dict[str, Any]]) -> None:
    """Ranks of one copy take the same share; what is exchanged by share and what by rank keep apart."""
    assert [found["share"] for found in ranks] == [[[0, 2], [4, 6]]] * 2 + [[[1, 3], [5, 7]]] * 2
    assert [found["gathered"] for found in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["sum"] for found in ranks] == [2, 4, 2, 4]
    assert [found["mean"] for found in ranks] == [pytest.approx(mean) for mean in (4 / 3, 7 / 3, 4 / 3, 7 / 3)]
    assert all(found["everybody"] == [0, 1, 2, 3] for found in ranks)


class Misplaced(DDPStrategy):
    """A strategy whose shares are not those of the ranks."""

    def setup(self, world: Any) -> Layout:
        layout: Any = self.ddp_options["layout"]
        return Layout(*layout) if isinstance(layout, tuple) else layout


@pytest.mark.parametrize(
    ("layout", "seen"),
    [
        ((1, 4), r"Layout\(rank=1, size=4, .*\) on rank 1, .* share 1 of 2"),
        ((2, 2), r"Layout\(rank=2, size=2, .*\) on rank 1, .* share 1 of 2"),
        ((0, 1), r"Layout\(rank=0, size=1, .*\) on rank 1, .* share 1 of 2"),
        ([1, 2], r"\[1, 2\] on rank 1"),
    ],
)
def test_shares_that_cannot_be_those_of_the_ranks_are_refused(layout: Any, seen: str) -> None:
    """A layout is held to the group that it names, or to all ranks: its shares would be lost or taken twice."""
    strategy = Misplaced()
    strategy.ddp_options = {"layout": layout}
    world = World(Placement(1, 2, 1, 2), torch.device("cpu"), options=Options(strategy=strategy))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda group: 1)
        patch.setattr(dist, "get_world_size", lambda group: 2)
        with pytest.raises(OptionError, match=rf"Misplaced\.setup\(\) returned {seen}"):
            world.arrange()


def test_the_numbers_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """Gradients that the strategy averages train as one process does, also over windows of micro-batches."""
    for found in ranks:
        assert found["trained"] == pytest.approx(trained(8), abs=1e-12)
        assert found["accumulated"] == pytest.approx(accumulated(8), abs=1e-12)


def test_a_strategy_refuses_before_any_process_starts() -> None:
    """The caller asks the strategy whether it can run as the options say."""

    @dw.distributed(nprocs=2, strategy=ByHand(), precision="fp16")
    def never() -> None:
        raise AssertionError

    with pytest.raises(OptionError, match="has no precision"):
        never()


class FlatShards(DDPStrategy):
    """A strategy whose optimizer steps a flat shard of its own on each rank, in the place of the parameters."""

    shards = True

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> torch.optim.Optimizer:
        shard = nn.Parameter(torch.full((2,), float(rank())))
        shard.grad = torch.ones(2)
        return torch.optim.SGD([shard], lr=0.1)


def test_shards_of_a_strategy_are_no_strangers_to_the_first_step() -> None:
    """The proof after the first step compares the model, and leaves the optimizer's tensors to the strategy."""

    @dw.distributed(nprocs=2, strategy=FlatShards())
    def train(differ: bool) -> None:
        model = dw.wrap_model(nn.Linear(4, 1))
        optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if differ:
            with torch.no_grad():
                next(model.parameters()).add_(rank())
        for _ in range(4):
            dw.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            dw.gather_object(None)

    train(False)
    with pytest.raises(ModelError, match="'weight' is the first"):
        train(True)


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_a_strategy_of_the_script_itself_goes_to_fresh_processes(tmp_path: Path) -> None:
    """A strategy whose class is in the script, or in a notebook, reaches ranks that have not imported the script."""
    example = Path(__file__).parents[2] / "examples" / "custom_strategy.py"
    ended = run_python(
        example,
        "--steps",
        "5",
        "--out",
        tmp_path / "out",
        env={**os.environ, "DISTWRAP_LAUNCHER": "forkserver"},
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks meet over gloo" in ended.stdout


def test_a_step_asks_the_strategy(ranks: list[dict[str, Any]]) -> None:
    """Clipping and stepping are the strategy's, and a step that it skips is said to be skipped."""
    for found in ranks:
        assert found["asked"] == ["clip", "step"] * 3
        assert found["taken"] == [True, True, False]


def test_a_state_in_parts_is_put_together_by_all_ranks(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Every rank takes part in the state of a checkpoint that rank 0 writes; one process loads it."""
    for found in ranks:
        assert found["state"] == ["state of 4", "state of 4", "load Linear", "load SGD"]
    model, optimizer = prepared()
    state = dw.load(folder / "state.pt", into={"model": model, "optimizer": optimizer})
    assert weights(model) == state["weights"]
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (1, 4)
