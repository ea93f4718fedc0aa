"""The generators of `rank_generator` are part of the state of a run."""

from __future__ import annotations

import gc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.group.world import current_world
from distwrap.seeding import RankGenerators
from distwrap.testing import run_ranks
from tests.slow import slow

STEPS, EPOCHS = 4, 3  # of an epoch; in all


def train(path: Path, cut: tuple[int, int | None] | None, early: bool) -> list[Any]:
    """Train with noise of two generators; leave after a step of an epoch, as a job does whose time is up.

    Args:
        path: of the checkpoint.
        cut: the epoch and the steps in it after which this run ends; ``None`` for all steps of it.
        early: whether the generators are made before the checkpoint is loaded.
    """
    x = torch.arange(2.0 * STEPS * dw.world_size()).reshape(-1, 1)
    model = dw.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(TensorDataset(x), batch_size=2, shuffle=True))
    noises = [dw.rank_generator(1), dw.rank_generator(2)] if early else []
    objects = {"model": model, "optimizer": optimizer, "loader": loader, "run": dw.run_state()}
    state = dw.resume_from(path, into=objects) or {"epoch": 0}
    noises = noises or [dw.rank_generator(2), dw.rank_generator(1)][::-1]  # in another order too
    for epoch in range(state["epoch"], EPOCHS):
        is_last = cut is not None and cut[0] == epoch
        stop = cut[1] if cut is not None and is_last else None
        for (batch,) in islice(loader, stop):
            inputs = batch + torch.randn(batch.shape, generator=noises[0])
            nn.functional.mse_loss(model(inputs), torch.randn(batch.shape, generator=noises[1])).backward()
            optimizer.step()
            optimizer.zero_grad()
        dw.save({**objects, "epoch": epoch + (stop is None)}, path)
        if is_last:
            return []
    return [model.state_dict()["weight"].tolist(), [torch.rand(2, generator=noise).tolist() for noise in noises]]


@pytest.mark.parametrize("ranks", [slow(1, why="two ranks are in make test"), 2])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, ranks: int) -> None:
    """Weights and noise are the same bits, cut within an epoch and at its end, by generators made early or late."""
    run = dw.distributed(nprocs=ranks, seed=0, timeout=60, returns="all")(train)
    expected = run(tmp_path / "whole.pt", None, True)
    for name, cut, early in (("within", (1, 3), False), ("end", (0, None), True)):
        path = tmp_path / f"{name}.pt"
        assert run(path, cut, True) == [[]] * ranks
        assert run(path, None, early) == expected, name
    if ranks == 2:
        assert expected[0][1] != expected[1][1]


def drawn(generator: torch.Generator) -> list[float]:
    return torch.rand(2, generator=generator).tolist()


def test_more_ranks_than_were_saved() -> None:
    """Ranks that were saved go on with their numbers, and new ones begin with their own."""

    def on_rank() -> dict[str, Any]:
        noise = dw.rank_generator(1)
        first = drawn(noise)
        state = dw.run_state().state_dict()
        return {"state": state, "first": first, "second": drawn(noise)}

    (alone,) = run_ranks(on_rank, 1)

    def with_more() -> list[float]:
        noise = dw.rank_generator(1)
        dw.run_state().load_state_dict(alone["state"])
        return drawn(noise)

    assert run_ranks(with_more, 2) == [alone["second"], run_ranks(on_rank, 2)[1]["first"]]


def test_a_checkpoint_without_generators() -> None:
    """A checkpoint from before there were any, or of a run that had made none, leaves them where they are."""

    def on_rank() -> bool:
        state = dw.run_state().state_dict()
        assert "generators" not in state["random"][0]
        noise = dw.rank_generator(1)
        drawn(noise)
        before = noise.get_state()
        dw.run_state().load_state_dict(state)
        return torch.equal(noise.get_state(), before)

    assert run_ranks(on_rank, 1) == [True]


def test_the_seed_and_the_number_tell_which_one_it_is() -> None:
    """The n-th generator of a seed takes the n-th's state, which waits until it is made, through another save too."""

    def on_rank() -> None:
        first, second, other = dw.rank_generator(1), dw.rank_generator(1), dw.rank_generator(5)
        drawn(second)
        drawn(other)
        drawn(other)
        state = dw.run_state().state_dict()
        expected = [drawn(first), drawn(second), drawn(other)]
        part = current_world().part(RankGenerators)
        part.__init__(current_world())  # type: ignore[misc]  # as in a run that begins
        late = dw.rank_generator(5)
        dw.run_state().load_state_dict(state)
        again = dw.run_state().state_dict()
        assert again["random"][0]["generators"]["states"][0][:3] == [1, "cpu", 1]
        dw.run_state().load_state_dict(again)
        assert [drawn(dw.rank_generator(1)), drawn(dw.rank_generator(1)), drawn(late)] == expected
        assert drawn(dw.rank_generator(1)) == expected[0]  # a third one begins at its seed
        state["random"][0]["generators"]["states"][0] = [7, "cpu", 1, torch.zeros(3, dtype=torch.uint8)]
        dw.run_state().load_state_dict(state)
        with pytest.raises(dw.errors.CheckpointError, match=r"rank_generator\(7\) that is not"):
            dw.rank_generator(7)

    run_ranks(on_rank, 1)


def test_generators_are_held_weakly() -> None:
    """Those that the loop has dropped are not saved, and a new seed in each step takes no memory."""

    def on_rank() -> int:
        kept = dw.rank_generator(0)
        for step in range(5000):
            dw.rank_generator(step)
        gc.collect()
        part = current_world().part(RankGenerators)
        assert [state[:3] for state in part.states()] == [[0, "cpu", 1]]
        del kept
        assert part.states() == []
        return len(part._count)

    assert run_ranks(on_rank, 1)[0] <= 1000


def test_a_damaged_state_is_refused() -> None:
    """What is no state of a generator is a CheckpointError, as elsewhere in the state of a run."""

    def on_rank() -> None:
        noise = dw.rank_generator(3)
        for damaged in (torch.zeros(3), "text", None):
            state = dw.run_state().state_dict()
            state["random"][0]["generators"]["states"][0][3] = damaged
            with pytest.raises(dw.errors.CheckpointError, match="not a state"):
                dw.run_state().load_state_dict(state)
        drawn(noise)

    run_ranks(on_rank, 1)
