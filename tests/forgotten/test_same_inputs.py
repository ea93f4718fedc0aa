"""Ranks that all compute on the same inputs are told so, as where `shard_loader` was forgotten."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distwrap as dw
from distwrap.errors import LoaderError, OptionError
from distwrap.group.world import current_world
from distwrap.model.checks.same_inputs import SameInputs
from distwrap.model.wrapped_models import handle_of
from distwrap.testing import run_ranks
from tests.forgotten.nets import Net
from tests.slow import few

BATCHES, BATCH = 8, 4


def samples() -> TensorDataset:
    numbers = torch.randn(BATCHES * BATCH, 7, generator=torch.Generator().manual_seed(3))
    return TensorDataset(numbers[:, :4], numbers[:, 4:])


def plain(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH, **kwargs)


def train(model: nn.Module, batches: Iterable[Any], *, by_method: bool = True) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 0
    for x, y in batches:
        loss = model.loss(x, y) if by_method else (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    return count


def drawn(generator: torch.Generator | None = None) -> list[Any]:
    """Draw batches as a loop does that has no loader."""
    return [torch.randn(BATCH, 7, generator=generator).split((4, 3), 1) for _ in range(BATCHES)]


class Stream(IterableDataset[Any]):
    """Divides itself, wrongly: each rank reads all."""

    def __iter__(self) -> Any:
        return iter([samples()[i] for i in range(BATCHES * BATCH)])


def shuffled_alike() -> DataLoader[Any]:
    torch.manual_seed(1)
    return plain(shuffle=True)


def seeded_alike() -> list[Any]:
    torch.manual_seed(1)
    return drawn()


FORGOTTEN: dict[str, Callable[[], Iterable[Any]]] = {
    "in order": plain,
    "shuffled alike": shuffled_alike,
    "noise": seeded_alike,
    "a generator": lambda: drawn(torch.Generator().manual_seed(5)),
    "a stream": lambda: dw.shard_loader(DataLoader(Stream(), batch_size=BATCH), split="dataset"),
}


@pytest.mark.parametrize("by_method", [True, False], ids=["a method", "forward"])
@pytest.mark.parametrize("data", few(FORGOTTEN, 2))
def test_the_same_data_on_all_ranks(data: str, by_method: bool) -> None:
    """It is an error before the second epoch, which names the loop over a plain loader, or says how to draw apart."""

    def on_rank() -> None:
        train(dw.wrap_model(Net()), FORGOTTEN[data](), by_method=by_method)

    with pytest.raises(LoaderError) as refusal:
        run_ranks(on_rank, 2)
    words = str(refusal.value).splitlines()[0]
    line = train.__code__.co_firstlineno
    assert f"Net has got the same inputs on all 2 ranks, batch after batch, at test_same_inputs.py:{line + 4}" in words
    loop = (
        f"The loop at test_same_inputs.py:{line + 3} iterates over a DataLoader that is not sharded: give it "
        "shard_loader(loader)."
    )
    assert (loop in words) == ("order" in data or "shuffled" in data)
    assert ("generator=rank_generator(seed)" in words) != (loop in words)
    assert ("cuts its batches itself, split(x[i : i + n])" in words) != (loop in words)
    assert words.endswith("say shard_loader(loader, mode='same'), or wrap_model(model, same_inputs=True).")


def _warmed_up(model: nn.Module) -> Iterable[Any]:
    batch = next(iter(plain()))
    assert train(model, [batch] * 5) == 5
    return dw.shard_loader(plain())


MEANT: dict[str, Callable[[nn.Module], Iterable[Any]]] = {
    "a share each": lambda _: dw.shard_loader(plain(shuffle=True)),
    "alike on purpose": lambda _: dw.shard_loader(plain(shuffle=True), mode="same"),
    "a stream alike on purpose": lambda _: dw.shard_loader(DataLoader(Stream(), batch_size=BATCH), mode="same"),
    "a generator of its own": lambda _: drawn(dw.rank_generator(5)),
    "one batch over and over": lambda _: [next(iter(plain()))] * 20,
    "after a warm-up": _warmed_up,
    "small whole numbers": lambda _: [(torch.ones(1, 4) * (i % 3), torch.ones(1, 3)) for i in range(20)],
}


@pytest.mark.parametrize("data", few(MEANT, 3))
def test_what_is_meant(data: str) -> None:
    """Data of a share each, or alike on purpose, or that says nothing, is left alone."""

    def on_rank() -> int:
        model = dw.wrap_model(Net())
        return train(model, MEANT[data](model))

    one, other = run_ranks(on_rank, 2)
    assert one == other >= BATCHES // 2


def test_by_model() -> None:
    """`same_inputs=True` says for a model that it is meant."""
    assert run_ranks(lambda: train(dw.wrap_model(Net(), same_inputs=True), plain()), 2) == [BATCHES] * 2


def test_mode_same_is_one_process() -> None:
    """All ranks get all samples in one order, and train as one process does on that order."""

    def on_rank() -> tuple[list[Any], list[list[float]]]:
        model = dw.wrap_model(Net())
        loader = dw.shard_loader(plain(shuffle=True), mode="same", seed=4)
        batches = [x.tolist() for x, _ in loader]
        train(model, loader)
        assert dw.shard_loader(loader) is loader
        return batches, [parameter.flatten().tolist() for parameter in model.parameters()]

    (batches, weights), again = run_ranks(on_rank, 2)
    assert (batches, weights) == again
    assert sorted(row for batch in batches for row in batch) == sorted(samples().tensors[0].tolist())
    [(alone, expected)] = run_ranks(on_rank, 1)
    assert weights == [pytest.approx(each, abs=1e-7) for each in expected]
    assert batches == alone


def test_evaluation_is_not_looked_at() -> None:
    """With gradients off, or in `eval()`, all ranks may go over the same data."""

    def on_rank() -> int:
        model = dw.wrap_model(Net())
        for mode in (model.train, model.eval):
            mode()
            with torch.set_grad_enabled(mode == model.eval):
                for x, y in plain():
                    model.loss(x, y)
        model.train()
        return train(model, dw.shard_loader(plain()))

    assert run_ranks(on_rank, 2) == [BATCHES // 2] * 2


def test_nothing_is_left_in_the_loop() -> None:
    """Once the ranks are seen to have other data, a call goes the way that it goes without the check."""

    def on_rank() -> tuple[bool, bool]:
        model = dw.wrap_model(Net())
        routing = handle_of(model).routing
        before = routing.is_looked_at
        train(model, dw.shard_loader(plain()))
        return before, routing.is_looked_at or routing.dressed is not None

    assert run_ranks(on_rank, 2) == [(True, dw.device().type != "cpu")] * 2


def test_rank_generator() -> None:
    """Each rank draws numbers of its own, and the first one those of a single process."""
    one, other = run_ranks(lambda: torch.randn(3, generator=dw.rank_generator(7)).tolist(), 2)
    assert one != other
    assert one == torch.randn(3, generator=torch.Generator().manual_seed(7)).tolist()
    assert one == torch.randn(3, generator=dw.rank_generator(7)).tolist()
    with pytest.raises(OptionError, match="seed=-1"):
        dw.rank_generator(-1)


def test_a_model_that_is_gone_before_its_watch() -> None:
    """The collector may take them in this order, between two looks of the run's end."""

    def on_rank() -> None:
        model = dw.wrap_model(Net())
        Net.watching = list(current_world().part(SameInputs)._watches)  # type: ignore[attr-defined]
        del model
        gc.collect()

    run_ranks(on_rank, 2)
