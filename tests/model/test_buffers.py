"""Buffers: each rank's own while it trains, rank 0's in evaluation and in what is saved."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import distwrap as dw
from distwrap.environments import distwrap_environment
from distwrap.errors import OptionError
from distwrap.model import buffers
from distwrap.model.wrapped_models import handle_of
from distwrap.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(2, 2).double(), nn.BatchNorm1d(2).double()
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("code", torch.zeros(2, dtype=torch.float64))
        self.mask: torch.Tensor
        self.code: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.code += 1
        return self.norm(self.body(x)) * self.mask


def own_batch(step: int) -> torch.Tensor:
    return torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + dw.rank()))


def train(model: nn.Module, steps: int) -> None:
    for step in range(steps):
        model(own_batch(step)).pow(2).sum().backward()


def statistics(model: nn.Module) -> list[Any]:
    return [value.tolist() for value in model.buffers()]


def test_eval_takes_over_rank_zeros() -> None:
    """After training on different batches all ranks evaluate with rank 0's statistics, as raw DDP would."""

    def on_rank() -> tuple[list[Any], list[Any], list[Any]]:
        torch_way = nn.parallel.DistributedDataParallel(Net())
        train(torch_way, 3)
        model = dw.wrap_model(Net())
        train(model, 3)
        before = statistics(model)
        model.eval()
        return before, statistics(model), statistics(torch_way)

    first, *others = run_ranks(on_rank, 3)
    assert first[0] == first[1] == first[2]
    for before, after, broadcast in others:
        assert before != after == first[1]
        assert before != broadcast  # nothing was broadcast before a forward


def test_rank_zero_may_evaluate_alone_and_go_on() -> None:
    """``eval()`` on rank 0 alone exchanges nothing; when all ranks do later, they have what it has then."""

    def on_rank() -> list[Any]:
        model = dw.wrap_model(Net())
        for _ in range(3):
            train(model, 2)
            if dw.is_rank_zero():
                model.eval()
                with torch.no_grad():
                    model(own_batch(9))
                model.train()
        train(model, 1)
        model.eval()
        seen = statistics(model)
        model.train()
        train(model, 1)
        return seen

    one, other = run_ranks(on_rank, 2, timeout=30)
    assert one == other


@pytest.mark.slow("others of its kind are in `make test`")
def test_all_ranks_see_the_same_though_rank_zero_goes_on_at_once() -> None:
    """Rank 0 evaluates nothing and trains on; the others still get what it had when it paused, each time."""

    def on_rank() -> list[Any]:
        model, seen = dw.wrap_model(Net()), []
        for _ in range(4):
            train(model, 2)
            model.eval()
            seen.append(statistics(model))
            model.train()
        return seen

    one, other = run_ranks(on_rank, 2)
    assert one == other
    assert len({str(seen) for seen in one}) == 4


@pytest.mark.slow("others of its kind are in `make test`")
def test_another_rank_may_evaluate_alone() -> None:
    """Nobody waits for a rank that evaluates alone, and it has rank 0's statistics all the same."""

    def on_rank() -> None:
        model = dw.wrap_model(Net())
        train(model, 2)
        if dw.rank() == 1:
            model.eval()
            assert model.code.tolist() in ([2, 2], [3, 3])  # rank 0 has begun its next step, or not
            model.train()
        train(model, 2)
        dw.assert_in_sync(dw.unwrap_model(model).body)

    run_ranks(on_rank, 2, timeout=30)


@pytest.mark.parametrize("broadcast", [True, False])
def test_broadcast_buffers_may_still_be_chosen(broadcast: bool) -> None:
    """Given by the user, DDP's own option decides: at each forward, or never."""

    def on_rank() -> tuple[float, float]:
        model = dw.wrap_model(Net(), broadcast_buffers=broadcast)
        net = dw.unwrap_model(model)
        assert isinstance(net, Net)
        for _ in range(2):
            net.code.fill_(dw.rank())
            model(own_batch(0)).sum().backward()
        model.eval()
        return net.code[0].item(), net.norm.running_mean.sum().item()  # type: ignore[union-attr]

    (code, mean), (other_code, other_mean) = run_ranks(on_rank, 2)
    assert (code, other_code) == ((1, 1) if broadcast else (1, 2))
    assert mean != other_mean


def test_sync_buffers_on_demand() -> None:
    """From rank 0, or averaged where that has a meaning; whole numbers and booleans are never averaged."""

    def on_rank() -> None:
        model = dw.wrap_model(Net())
        net: Any = dw.unwrap_model(model)
        for how, mean, count in (("rank0", 1.0, 0), ("mean", 1.5, 0)):
            net.norm.running_mean.fill_(dw.rank() + 1)
            net.norm.num_batches_tracked.fill_(dw.rank())
            net.mask[0] = dw.rank() == 0
            dw.sync_buffers(model, how)
            assert net.norm.running_mean.tolist() == [mean, mean]
            assert net.norm.num_batches_tracked.item() == count
            assert net.mask.tolist() == [True, True]
        with pytest.raises(OptionError, match="rank0"):
            dw.sync_buffers(model, "average")

    run_ranks(on_rank, 2)


def test_what_is_saved_has_rank_zeros(tmp_path: Path) -> None:
    """A checkpoint holds the statistics with which all ranks evaluate."""

    def on_rank() -> list[Any]:
        model = dw.wrap_model(Net())
        train(model, 2)
        dw.save({"model": model}, tmp_path / "a.pt")
        model.eval()
        return statistics(model)

    one, other = run_ranks(on_rank, 2)
    saved = dw.load(tmp_path / "a.pt")["model"]
    assert one == other == [saved[name].tolist() for name, _ in Net().named_buffers()]


@pytest.mark.slow("others of its kind are in `make test`")
def test_uneven_inputs_under_torchs_join() -> None:
    """With ranks that take different numbers of steps under ``Join``, evaluation still has rank 0's statistics."""

    def on_rank() -> list[Any]:
        model = dw.wrap_model(Net())
        with Join([model]):
            train(model, 2 + 2 * dw.rank())
        model.eval()
        return statistics(model)

    one, other = run_ranks(on_rank, 2, timeout=30)
    assert one == other


@pytest.mark.slow("others of its kind are in `make test`")
def test_a_large_buffer_that_never_changes_does_not_travel() -> None:
    """Only statistics and buffers that training has changed are exchanged."""

    def on_rank() -> int:
        net = Net()
        net.register_buffer("table", torch.randn(1000, 1000))
        model: Any = dw.wrap_model(net)
        train(model, 1)
        return len(handle_of(model).buffers._packed())

    assert max(run_ranks(on_rank, 2)) < 20_000


def test_a_rank_ahead_of_rank_zero_waits_for_its_statistics() -> None:
    """With an evaluation after each step, a rank that comes first gets rank 0's of this step, not of the one before."""

    def on_rank() -> list[Any]:
        model, seen = dw.wrap_model(Net()), []
        for step in range(3):
            train(model, 1)
            if dw.is_rank_zero() and step:
                time.sleep(0.6)
            model.eval()
            seen.append(statistics(model))
            model.train()
        return seen

    one, other = run_ranks(on_rank, 2)
    assert one == other


@pytest.mark.slow("others of its kind are in `make test`")
def test_statistics_that_were_made_anew_without_a_backward_are_taken_over() -> None:
    """Forwards in training that have no backward count too, as where BatchNorm's statistics are made anew."""

    def on_rank() -> list[Any]:
        model = dw.wrap_model(Net())
        train(model, 1)
        model.eval()
        model.train()
        with torch.no_grad():
            for step in range(3):
                if dw.is_rank_zero():
                    time.sleep(0.2)
                model(own_batch(step))
        model.eval()
        return statistics(model)

    one, other = run_ranks(on_rank, 2)
    assert one == other


@pytest.mark.slow("others of its kind are in `make test`")
def test_a_rank_for_which_rank_zero_waits_is_not_held_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 does not come as far, since it waits for this very rank, its buffers are taken as they are."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")

    def on_rank() -> list[Any]:
        buffers.PATIENCE = 0.5
        model = dw.wrap_model(Net())
        train(model, 1)
        if dw.rank() == 1:
            with torch.no_grad():
                model(own_batch(1))
            model.eval()
        dw.barrier()
        return statistics(model)

    one, other = run_ranks(on_rank, 2, timeout=20)
    assert one == other
    assert "eval() of Net on another rank, after 2 forwards in training, takes over" in capfd.readouterr().err


@pytest.mark.slow("others of its kind are in `make test`")
def test_evaluations_without_an_exchange_between_them_hold_nobody_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a window of `accumulate`: rank 0 may be evaluations ahead, and the other rank counts on from its own."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")

    def on_rank() -> None:
        buffers.PATIENCE = 0.5
        model = dw.wrap_model(Net())
        train(model, 1)
        if dw.rank() == 1:
            dw.barrier()
        for step in range(3):
            with torch.no_grad():
                model(own_batch(step))
            model.eval()
            model.train()
        if dw.rank() == 0:
            with torch.no_grad():
                model(own_batch(3))
            dw.barrier()
        dw.barrier()

    run_ranks(on_rank, 2, timeout=20)
    assert "rank 0 got no further" not in capfd.readouterr().err


def test_a_mean_of_the_buffers_stays_in_evaluation() -> None:
    """What sync_buffers() has made alike stays until training goes on, though rank 0 has older statistics at hand."""

    def on_rank() -> list[Any]:
        model = dw.wrap_model(Net())
        train(model, 1)
        model.eval()
        model.train()
        dw.unwrap_model(model).norm.running_mean.fill_(dw.rank())  # type: ignore[union-attr,operator]
        dw.sync_buffers(model, "mean")
        mean = statistics(model)
        if dw.is_rank_zero():
            time.sleep(0.6)
        model.eval()
        assert statistics(model) == mean
        model.train()
        train(model, 1)
        model.eval()
        assert statistics(model) != mean
        return statistics(model)

    one, other = run_ranks(on_rank, 2)
    assert one == other


@pytest.mark.slow("others of its kind are in `make test`")
def test_eval_inside_consolidate_leaves_the_mean_alone() -> None:
    """Inside consolidate() all ranks evaluate with the mean; afterwards each has its own, and eval() is as before."""

    def on_rank() -> tuple[list[Any], list[Any], list[Any]]:
        model = dw.wrap_model(Net(), comm="local_sgd")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(own_batch(step)).pow(2).sum().backward()
            optimizer.step()
        own = statistics(model)
        if dw.is_rank_zero():
            model.eval()
            model.train()
        with dw.consolidate(model):
            mean = statistics(model)
            model.eval()
            inside = statistics(model)
            model.train()
        assert inside == mean != own == statistics(model)
        model.eval()
        after = statistics(model)
        dw.consolidate(model)
        mean = statistics(model)
        model.train()
        model.eval()
        assert statistics(model) == mean
        return own, inside, after

    (own, inside, after), (_, others_inside, others_after) = run_ranks(on_rank, 2)
    assert inside == others_inside
    assert after == others_after == own


@pytest.mark.slow("others of its kind are in `make test`")
def test_buffers_do_not_stay_in_the_store() -> None:
    """The file in which the ranks of one node meet keeps what it is given: buffers go another way."""

    def on_rank() -> int:
        path = os.environ[distwrap_environment.STORE]
        model = dw.wrap_model(nn.BatchNorm1d(100_000), same_inputs=True)
        before = os.stat(path).st_size
        for _ in range(4):
            model(torch.randn(2, 100_000)).sum().backward()
            model.eval()
            model.train()
        dw.barrier()
        after = os.stat(path).st_size
        dw.barrier()  # until here rank 0 leaves nothing for those who come later
        return after - before

    assert max(run_ranks(on_rank, 2)) < 100_000
