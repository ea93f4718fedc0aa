"""A strategy's own parts of a sharded checkpoint: pieces that differ by rank, and what cannot be put together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import distwrap as dw
from distwrap import Strategy
from distwrap.errors import CheckpointError
from distwrap.model.checks.in_sync import ComparedTensor, tensors_of
from distwrap.testing import run_ranks
from tests.strategies.wrappers import Copy


class Rows(Strategy):
    """Each rank's optimizer steps some rows of each parameter, and holds their momentum alone."""

    shards = True

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return Copy(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> torch.optim.Optimizer:
        whole = optimizer.param_groups[0]["params"]
        pairs = [(each, nn.Parameter(mine(each.detach()))) for each in whole]  # which share their numbers
        optimizer.param_groups[0]["params"] = [rows for _, rows in pairs]

        def before(*_: Any) -> None:
            for each, rows in pairs:
                rows.grad = mine(dw.reduce(each.grad))

        def after(*_: Any) -> None:
            for each, rows in pairs:
                each.data.copy_(dw.gather(rows.detach()))
                each.grad = None

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        optimizer.whole = whole  # type: ignore[attr-defined]
        return optimizer

    def held(self, model: nn.Module) -> Iterable[ComparedTensor]:
        return tensors_of(model)

    def parts(self, thing: Any) -> dict[str, Any] | None:
        if isinstance(thing, nn.Module):
            return {name: piece(mine(value), value) for name, value in thing.state_dict().items()}
        state = thing.state_dict()
        held = state["state"].items()
        momenta = {index: piece(one["momentum_buffer"], thing.whole[index]) for index, one in held}
        return {**state, "state": {index: {"momentum_buffer": momentum} for index, momentum in momenta.items()}}

    def load_state(self, thing: Any, state: dict[str, Any]) -> None:
        if not isinstance(thing, nn.Module):
            momenta = {
                index: {"momentum_buffer": mine(one["momentum_buffer"])} for index, one in state["state"].items()
            }
            state = {**state, "state": momenta}
        super().load_state(thing, state)


def mine(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows, as torch's `Shard(0)` divides them: the last ranks may have none."""
    rows = whole.chunk(dw.world_size())
    return rows[dw.rank()] if dw.rank() < len(rows) else whole[:0]


def piece(rows: torch.Tensor, whole: torch.Tensor) -> DTensor:
    """Return the rows as a part of the whole tensor."""
    mesh = init_device_mesh("cpu", (dw.world_size(),))
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())


def trained(path: Path, steps: range, *, save: bool = False) -> list[float]:
    """Train from the checkpoint, if there is one, on the same 12 examples in each step."""
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(3, 4, dtype=torch.float64))
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if steps.start:
        dw.load(path, into={"model": model, "optimizer": optimizer})
    for step in steps:
        x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        x = x[dw.rank() :: dw.world_size()]
        dw.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if save:
        dw.save({"model": model, "optimizer": optimizer}, path, io="sharded")
    return torch.cat([value.flatten() for value in model.state_dict().values()]).tolist()


def test_pieces_of_two_ranks_are_whole_for_any_number(tmp_path: Path) -> None:
    """DTensors of two ranks, saved in parts, go on in one process and on three ranks as if nobody had stopped."""
    path = tmp_path / "parts"
    train = dw.distributed(trained)
    expected = train(path, range(6))
    train.options(nprocs=2, strategy=Rows())(path, range(3), save=True)
    for nprocs, strategy in ((1, "ddp"), (3, Rows())):
        resumed = train.options(nprocs=nprocs, strategy=strategy)(path, range(3, 6))
        assert resumed == pytest.approx(expected, abs=1e-12), nprocs
    assert {type(value) for value in dw.load(path)["model"].values()} == {torch.Tensor}


class WholeParts(Rows):
    """Parts of which every rank has all."""

    def parts(self, thing: Any) -> dict[str, Any] | None:
        return dict(thing.state_dict())


def test_running_statistics_in_parts_are_any_ranks(tmp_path: Path) -> None:
    def on_rank() -> list[str]:
        model = dw.wrap_model(nn.BatchNorm1d(2), strategy=WholeParts())
        model(torch.eye(2) * dw.rank())
        dw.save(model, tmp_path / "parts", io="sharded")
        return list(dw.load(tmp_path / "parts"))

    assert run_ranks(on_rank, 2) == [list(nn.BatchNorm1d(2).state_dict())] * 2


def test_a_dtensor_of_which_each_rank_has_all_is_saved_in_a_file(tmp_path: Path) -> None:
    def on_rank() -> list[float]:
        mesh = init_device_mesh("cpu", (dw.world_size(),))
        dw.save({"w": DTensor.from_local(torch.ones(2), mesh, [Replicate()])}, tmp_path / "file.pt")
        loaded: list[float] = dw.load(tmp_path / "file.pt")["w"].to_local().tolist()
        return loaded

    assert run_ranks(on_rank, 2) == [[1.0, 1.0]] * 2


class Unlike(Rows):
    """Parts that no checkpoint can put together."""

    def __init__(self, parts: str) -> None:
        self.how = parts

    def parts(self, thing: Any) -> dict[str, Any] | None:
        size = 2 + dw.rank() if self.how == "sizes" else 2
        rows = torch.full((size,), float(dw.rank()))
        if self.how == "sizes":
            mesh = init_device_mesh("cpu", (dw.world_size(),))
            return {"flat": DTensor.from_local(rows, mesh, [Shard(0)])}
        return {f"flat{dw.rank()}" if self.how == "names" else "flat": rows}


def test_parts_that_are_no_whole_are_refused(tmp_path: Path) -> None:
    """Tensors that differ, and names or sizes that only one rank has, are errors on every rank, before a file."""

    def on_rank() -> None:
        for how, message in (
            ("numbers", r"'flat \(2,\)' .* differs"),
            ("names", r"rank 1 .* \(flat1 \(2,\)\)"),
            ("sizes", r"rank 1 .* \(flat \(6,\)\)"),
        ):
            model = dw.wrap_model(nn.Linear(1, 1), strategy=Unlike(how))
            with pytest.raises(CheckpointError, match=message):
                dw.save({"model": model}, tmp_path / "parts", io="sharded")
        whole = piece(torch.ones(1), torch.ones(2))
        with pytest.raises(CheckpointError, match=r"\['w'\]\[0\] is a DTensor"):
            dw.save({"w": [whole]}, tmp_path / "file.pt")

    run_ranks(on_rank, 2, timeout=60)
    assert list(tmp_path.iterdir()) == []
    assert not dist.is_initialized()
