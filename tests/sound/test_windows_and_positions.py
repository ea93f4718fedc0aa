"""Loops that end early: what was not trained on is not counted, no rank waits, and gradients are exchanged again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import distwrap as dw
from distwrap.errors import LoaderError, ModelError
from distwrap.group.world import deactivate
from distwrap.testing import run_ranks
from tests.data.streams import Resumable
from tests.slow import few

N = 24


@pytest.fixture(autouse=True)
def own_world() -> Iterator[None]:
    """A preemption holds for the rest of the run: the next test begins another one."""
    yield
    deactivate()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(1, 1).double()


def numbers(model: nn.Module) -> list[float]:
    return [p.item() for p in model.parameters()]


def make(kind: str, steps: int, model: nn.Module, loader: Any, **options: Any) -> tuple[Any, Any]:
    """Return the loop and its `Lockstep`, with or without windows, around or inside."""
    if kind == "inside":
        lockstep = dw.lockstep(dw.accumulate(loader, steps, model), **options)
        return lockstep, lockstep
    lockstep = dw.lockstep(loader, **options)
    return (dw.accumulate(lockstep, steps, model) if kind == "around" else lockstep), lockstep


def until_the_end(kind: str, end: str) -> tuple[list[int], list[int]]:
    """Leave a loop early, and go on from its position; return what each of both stepped over on this rank."""
    model = dw.wrap_model(net())
    loader: Any = dw.shard_loader(DataLoader(range(N), batch_size=1))  # type: ignore[arg-type]
    saved: list[Any] = []
    skip = (lambda item: int(item[0][0] if kind == "inside" else item[0]) >= N // 2) if end == "skip" else None
    loop, lockstep = make(
        kind, 3, model, loader, skip=skip, on_preempt=lambda preemption: saved.append(loader.state_dict())
    )
    window: list[int] = []
    first: list[int] = []
    for item in loop:
        batch, last = (item, True) if kind == "alone" else (item[0], item[1].last)
        window.append(int(batch))
        if last:
            first, window = first + window, []
        if lockstep.step == 5:
            if end == "stop":
                lockstep.stop()
            elif end != "skip":
                os.kill(os.getpid(), signal.SIGUSR2)
        if end == "skip" and lockstep.skipped == 0 and lockstep.step == 6:
            os.kill(os.getpid(), signal.SIGUSR2)
    again: Any = dw.shard_loader(DataLoader(range(N), batch_size=1))  # type: ignore[arg-type]
    again.load_state_dict(saved[0] if saved else loader.state_dict())
    return first, [int(batch) for batch in again]


@pytest.mark.parametrize("kind", ["alone", "around", "inside"])
@pytest.mark.parametrize("end", few(["stop", "preempted", "skip"], 1))
def test_what_was_not_trained_on_is_not_counted(kind: str, end: str) -> None:
    """After a stop, a signal or a skip the position is after the last batch that was stepped over."""
    for first, rest in run_ranks(until_the_end, 2, kind, end):
        assert 5 <= len(first) <= 6
        both = first + rest
        assert both == list(range(both[0], N, 2))


def test_a_position_in_a_window_is_its_start() -> None:
    """What has accumulated is not in a checkpoint, so a loop that goes on begins the window again."""
    loader: Any = dw.shard_loader(DataLoader(range(7), batch_size=1))  # type: ignore[arg-type]
    consumed = [loader.state_dict()["consumed"] for _ in dw.accumulate(loader, 3, net())]
    assert consumed == [0, 0, 3, 3, 3, 6, 7]


def uneven(kind: str, length: list[int]) -> tuple[list[tuple[int, int]], list[float]]:
    model = dw.wrap_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop, _ = make(kind, 3, model, [torch.full((1, 1), i + 1.0).double() for i in range(length[dw.rank()])])
    seen = []
    for x, window in loop:
        seen.append((window.index, window.size))
        (model(x).sum() / window.size).backward()
        if window.last:
            optimizer.step()
            optimizer.zero_grad()
    dw.assert_in_sync(model)
    return seen, numbers(model)


@pytest.mark.parametrize("kind", ["around", "inside"])
def test_uneven_windows_end_together(kind: str) -> None:
    """The last window has the size of the shortest rank, and nobody waits for the others."""
    one, other = run_ranks(uneven, 2, kind, [5, 7])
    assert one == other
    assert one[0] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def lengths(n: int, size: int | None, drop: bool, mode: Any, workers: int) -> tuple[int, int]:
    loader = dw.shard_loader(DataLoader(Stream(n), batch_size=size, drop_last=drop, num_workers=workers), mode=mode)
    return len(loader), len(list(loader))


def test_a_stream_has_the_length_of_its_share() -> None:
    """In every mode, with and without workers, `len` is how many batches come."""

    def on_rank() -> list[tuple[int, int]]:
        return [
            lengths(n, size, drop, mode, workers)
            for n, size, drop, workers in [(11, 2, False, 0), (11, 2, True, 0), (7, None, False, 0), (13, 2, False, 2)]
            for mode in ("pad", "exact", "drop")
        ]

    for found in run_ranks(on_rank, 2):
        assert [told for told, _ in found] == [came for _, came in found]


class Uneven(Stream):
    """Takes its rank's part itself, and is told the epoch."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_rank_that_begins_again_stays_in_the_epoch() -> None:
    """With mode="pad" the ranks are in one epoch afterwards, however often one of them began again."""

    def on_rank() -> tuple[list[int], list[list[int]]]:
        dataset = Uneven(5 if dw.rank() == 0 else 2)
        loader = dw.shard_loader(DataLoader(dataset, batch_size=None), mode="pad", split="dataset")
        items = [list(loader), list(loader)]
        return dataset.epochs, items

    (one, longer), (other, shorter) = run_ranks(on_rank, 2)
    assert longer == [list(range(5))] * 2
    assert shorter == [[0, 1, 0, 1, 0]] * 2
    assert sorted(set(one)) == sorted(set(other)) == [0, 1]


def test_windows_over_a_stream() -> None:
    """A stream's windows are of one size on all ranks, and the last one is short."""

    def on_rank() -> list[tuple[int, int]]:
        model = dw.wrap_model(net())
        loader = dw.shard_loader(DataLoader(Stream(9), batch_size=1))
        seen = []
        for x, window in dw.accumulate(loader, 3, model):
            model(x.double()[:, None]).sum().backward()
            seen.append((window.index, window.size))
        return seen

    assert run_ranks(on_rank, 2) == [[(0, 3), (1, 3), (2, 3), (0, 1)]] * 2


def left(kind: str) -> list[float]:
    """Leave a loop in its first window, hold what it iterates over, and train on without windows."""
    model = dw.wrap_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xs = [torch.full((1, 1), dw.rank() + 1.0).double()] * 6
    held, _ = (dw.accumulate(xs, 3, model), None) if kind == "held" else make(kind, 3, model, xs)
    for x, _ in held:
        model(x).sum().backward()
        break
    optimizer.zero_grad()
    for x in xs:
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers(model)


@pytest.mark.parametrize("kind", few(["held", "around", "inside"], 1))
def test_a_loop_that_is_left_exchanges_again(kind: str) -> None:
    """After a break the ranks train together, though the loop's iterator is held."""
    one, other = run_ranks(left, 2, kind)
    assert one == other


def test_a_break_on_one_rank_in_a_window_ends_all() -> None:
    """The others leave before their next micro-batch, and nobody waits."""

    def on_rank() -> tuple[int, int]:
        model = dw.wrap_model(net())
        count = 0
        for x, _ in dw.accumulate(dw.lockstep([torch.ones(1, 1).double()] * 8), 4, model):
            count += 1
            model(x).sum().backward()
            if dw.rank() == 1 and count == 2:
                break
        return count, dw.reduce(1, "sum")

    assert run_ranks(on_rank, 2) == [(2, 2)] * 2


def test_a_bar_on_one_rank() -> None:
    """Between the two it is seen through; what hides one from the other on one rank alone is an error on both."""

    def on_rank(hidden: bool) -> Any:
        loop: Any = dw.lockstep(range(7))
        if not hidden:
            loop = dw.progress(loop)
        elif dw.rank() == 0:
            loop = map(int, loop)
        try:
            return [(batch, window.size) for batch, window in dw.accumulate(loop, 4, net())]
        except LoaderError as error:
            return str(error)

    sizes = [(0, 4), (1, 4), (2, 4), (3, 4), (4, 3), (5, 3), (6, 3)]
    assert run_ranks(on_rank, 2, False) == [sizes, sizes]
    for rank, message in enumerate(run_ranks(on_rank, 2, True)):
        assert f"seen on rank {rank}" in message


@pytest.mark.parametrize("kind", few(["alone", "around", "inside", "plain"], 2))
def test_a_streams_own_position(kind: str) -> None:
    """A stream of which each rank takes every n-th item goes on after the last one that was trained on."""

    def on_rank() -> list[int]:
        loader: Any = dw.shard_loader(DataLoader(Resumable(N), batch_size=None))
        loop, lockstep = (loader, None) if kind == "plain" else make(kind, 3, net(), loader)
        first = []
        for item in loop:
            first.append(item if kind in ("alone", "plain") else item[0])
            if len(first) == 6 and lockstep is None:
                break
            if len(first) == 6:
                lockstep.stop()
        again: Any = dw.shard_loader(DataLoader(Resumable(N), batch_size=None))
        again.load_state_dict(loader.state_dict())
        return first + list(again)

    assert run_ranks(on_rank, 2) == [list(range(0, N, 2)), list(range(1, N, 2))]


def test_a_held_iterator_is_gone_on_with() -> None:
    """A loop may be left between windows, and another one goes on where it was."""
    windows = dw.accumulate(range(7), 3, net())
    first = [batch for batch, _ in zip((batch for batch, _ in windows), range(3), strict=False)]
    assert first == [0, 1, 2]
    for batch, _ in dw.accumulate(range(9), 3, net()):
        if batch == 4:
            break
    held = dw.accumulate(range(7), 3, net())
    for _, window in held:
        if window.last:
            break
    assert [(batch, window.size) for batch, window in held] == [(3, 3), (4, 3), (5, 3), (6, 1)]


def test_a_step_within_a_window_is_refused() -> None:
    """So is one of an optimizer itself, where the iterator of a loop that was left is held."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = iter(dw.accumulate([1, 2, 3], 3, model))
    for _ in held:
        model(torch.ones(1, 1).double()).sum().backward()
        break
    with pytest.raises(ModelError, match=r"close\(\)"):
        optimizer.step()
    held.close()  # type: ignore[attr-defined]
    optimizer.step()


def two_windows() -> list[float]:
    models = [dw.wrap_model(net()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    xs = [torch.full((i % 3 + 1, 1), i + 1.0).double() for i in range(12)][dw.rank() :: dw.world_size()]
    loops = [dw.accumulate(xs, 2, models[0]), dw.accumulate(xs, 3, models[1])]
    for both in zip(*loops, strict=True):
        for model, optimizer, (x, window) in zip(models, optimizers, both, strict=True):
            dw.backward(dw.scale_loss(model(x).pow(2).sum(), len(x), window=window))
            if window.last:
                optimizer.step()
                optimizer.zero_grad()
    for x, outer in dw.accumulate(xs, 3, models[0]):
        for y, inner in dw.accumulate(xs[:2], 2, models[1]):
            dw.backward(dw.scale_loss(models[1](y).pow(2).sum(), len(y), window=inner))
            if inner.last:
                optimizers[1].step()
                optimizers[1].zero_grad()
        dw.backward(dw.scale_loss(models[0](x).pow(2).sum(), len(x), window=outer))
        if outer.last:
            optimizers[0].step()
            optimizers[0].zero_grad()
    return [number for model in models for number in numbers(model)]


def by_hand(ranks: int) -> list[float]:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    xs = [torch.full((i % 3 + 1, 1), i + 1.0).double() for i in range(12)]

    def step(which: int, batch: list[torch.Tensor]) -> None:
        models[which](torch.cat(batch)).pow(2).mean().backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    def windows(size: int) -> list[list[torch.Tensor]]:
        return [xs[i : i + size * ranks] for i in range(0, 12, size * ranks)]

    for batch in windows(2):
        step(0, batch)
    for batch in windows(3):
        step(1, batch)
    for batch in windows(3):
        step(0, batch)
    for _ in range(12 // ranks):
        step(1, xs[: 2 * ranks])
    return [number for model in models for number in numbers(model)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_windows_at_once_and_nested(ranks: int) -> None:
    """Each loss counts in the window that is said."""
    for result in run_ranks(two_windows, ranks):
        assert result == pytest.approx(by_hand(ranks), rel=0, abs=1e-9)


def test_windows_that_cannot_be_told_apart() -> None:
    """A loss beside two windows needs a word; two loops over one model are an error."""
    one, other = net(), net()
    for (x, window), _ in zip(dw.accumulate([1.0] * 4, 2, one), dw.accumulate([1.0] * 4, 2, other), strict=True):
        loss = other(one(torch.full((1, 1), x).double())).sum()
        with pytest.raises(ModelError, match="window=window"):
            dw.scale_loss(loss, 1)
        dw.scale_loss(loss, 1, window=window)
    with pytest.raises(ModelError, match="another accumulate"):
        list(zip(dw.accumulate([1] * 4, 2, one), dw.accumulate([1] * 4, 2, one), strict=True))


def static(on: bool) -> list[float]:
    model = dw.wrap_model(net(), static_graph=on)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        xs = [torch.full((1, 1), i + 1.0).double() for i in range(14)][dw.rank() :: 2]
        for x, window in dw.accumulate(xs, 3, model):
            (model(x).tanh().sum() / window.size).backward()
            if window.last:
                optimizer.step()
                optimizer.zero_grad()
    return numbers(model)


def test_with_a_static_graph() -> None:
    """The numbers are those without it."""
    plain = run_ranks(static, 2, False)
    for result in run_ranks(static, 2, True):
        assert result == pytest.approx(plain[0], rel=0, abs=1e-12)


@pytest.mark.parametrize("shards", [False, True])
def test_batches_out_of_order_have_no_position(shards: bool) -> None:
    """With in_order=False a number of batches does not say which ones; between epochs it does not matter."""
    loader: Any = DataLoader(range(8), batch_size=2, num_workers=2, in_order=False)  # type: ignore[arg-type]
    loader = dw.shard_loader(loader, seed=0 if shards else None)
    for _ in loader:
        with pytest.raises(LoaderError, match="in_order=True"):
            loader.state_dict()
        break
    list(loader)
    assert loader.state_dict()["epoch"] == 2
