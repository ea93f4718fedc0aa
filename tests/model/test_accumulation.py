"""Accumulated gradients are those of one big batch in one process, whatever the ranks, windows and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import distwrap as dw
from distwrap.errors import LoaderError, ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.precision import LossScaling
from distwrap.strategies.windows import Windows
from distwrap.testing import run_ranks
from tests.slow import MORE_RANKS, slow

RANKS, MICRO = (1, 2, 3, 4), 12  # micro-batches in all: every number of ranks divides them
SAMPLES = 3
WINDOWS, DTYPES = (1, 2, 3, 5, 12), (torch.float64, torch.float32)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).to(dtype)


def tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches with 0 to 9 tokens each."""
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 10, (MICRO,), generator=generator).tolist()
    return [
        (torch.randn(n, 4, dtype=torch.float64, generator=generator), torch.randint(5, (n,), generator=generator))
        for n in counts
    ]


def trained_by_tokens(window: int, dtype: torch.dtype) -> tuple[list[float], list[int]]:
    model = dw.wrap_model(network(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mine = tokens()[dw.rank() :: dw.world_size()]
    sizes = []
    for (x, y), micro in dw.accumulate(mine, window, model):
        loss_sum = nn.functional.cross_entropy(model(x.to(dtype)), y, reduction="sum")
        dw.backward(dw.scale_loss(loss_sum, len(y)))
        if micro.last:
            sizes.append(micro.size)
            assert dw.optimizer_step(optimizer, max_norm=0.5)
            optimizer.zero_grad()
    dw.assert_in_sync(model)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist(), sizes


def expected_by_tokens(world_size: int, window: int, dtype: torch.dtype) -> list[float]:
    """Plain torch, one process, one big batch a step."""
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    micro = tokens()
    for first in range(0, MICRO // world_size, window):
        batch = micro[first * world_size : (first + window) * world_size]
        x, y = (torch.cat(parts) for parts in zip(*batch, strict=True))
        nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("nprocs", [1, 2, slow(3, why=MORE_RANKS), slow(4, why=MORE_RANKS)])
def test_uneven_tokens_are_one_big_batch(nprocs: int) -> None:
    """Every number of ranks and every window, the last one short or not, ranks without a token: to 1e-6."""

    def on_rank() -> list[Any]:
        return [trained_by_tokens(window, dtype) for window in WINDOWS for dtype in DTYPES]

    results = run_ranks(on_rank, nprocs, timeout=60)
    for number, (window, dtype) in enumerate((window, dtype) for window in WINDOWS for dtype in DTYPES):
        expected = expected_by_tokens(nprocs, window, dtype)
        for result in results:
            weights, sizes = result[number]
            assert weights == pytest.approx(expected, rel=0, abs=1e-6 if dtype == torch.float32 else 1e-9)
            assert sum(sizes) == MICRO // nprocs
            assert set(sizes[:-1]) <= {window}


@pytest.mark.parametrize("nprocs", RANKS)
def test_mean_losses_are_divided_by_the_true_window(nprocs: int) -> None:
    """With equal batches ``loss / window.size`` is the mean over the window, also in a short last one."""

    def on_rank() -> list[float]:
        model = dw.wrap_model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randn(MICRO, SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for batch, window in dw.accumulate(x[dw.rank() :: dw.world_size()], 5, model):
            (model(batch).pow(2).mean() / window.size).backward()
            if window.last:
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(MICRO, SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for first in range(0, MICRO // nprocs, 5):
        batch = x[first * nprocs : (first + 5) * nprocs]
        model(batch.flatten(0, 1)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    for weights in run_ranks(on_rank, nprocs):
        assert weights == pytest.approx(expected, rel=0, abs=1e-12)


def test_gradients_are_exchanged_once_a_window() -> None:
    """Within a window the gradients stay on their rank; the last backward averages them."""

    def on_rank() -> list[list[bool]]:
        layer = nn.Linear(1, 1, bias=False).double()
        model = dw.wrap_model(layer)
        alike = []
        for x, window in dw.accumulate([torch.full((1, 1), dw.rank() + 1.0).double()] * 5, 3, model):
            model(x).sum().backward()
            assert layer.weight.grad is not None
            grads = dw.gather(layer.weight.grad)
            alike.append([bool(window.last), bool(grads[0] == grads[1])])
            if window.last:
                model.zero_grad()
        return alike

    expected = [[False, False], [False, False], [True, True], [False, False], [True, True]]
    assert run_ranks(on_rank, 2) == [expected] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_mixed_precision_with_clipping(precision: str) -> None:
    """Two ranks with windows end where one process with big batches does, up to the small type; ranks alike."""

    def on_rank() -> list[float]:
        model = dw.wrap_model(network(torch.float32))
        if precision == "fp16":
            current_world().part(LossScaling).scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x, y), window in dw.accumulate(tokens()[dw.rank() :: dw.world_size()], 6 // dw.world_size(), model):
            loss_sum = nn.functional.cross_entropy(model(x.float()), y, reduction="sum")
            dw.backward(dw.scale_loss(loss_sum, len(y)))
            if window.last:
                assert dw.optimizer_step(optimizer, max_norm=0.1)
                optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    run = dw.distributed(precision=precision, launcher="forkserver", timeout=30, returns="all")(on_rank)
    one, other = run.options(nprocs=2)()
    assert one == other
    [alone] = run.options(nprocs=1)()
    assert one == pytest.approx(alone, abs=3e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.slow("others of its kind are in make test")
def test_several_models_and_compiled_ones() -> None:
    """Of several models, one compiled around its wrapper, all follow the window."""

    def on_rank() -> list[list[float]]:
        nets = [network(), network()]
        models: list[Any] = [dw.wrap_model(net) for net in nets]
        models[1] = torch.compile(models[1], backend="eager")
        for x, _ in dw.accumulate([torch.full((1, 4), dw.rank() + 1.0).double()] * 2, 2, models):
            (models[0](x) + models[1](x)).sum().backward()
        return [[p.grad.sum().item() for p in net.parameters() if p.grad is not None] for net in nets]

    one, other = run_ranks(on_rank, 2, timeout=60)
    assert one == other
    assert len(one[0]) == len(one[1]) == 4


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Bar:
    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __len__(self) -> int:
        return len(self.iterable)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


@pytest.mark.parametrize("kind", ["list", "loader", "generator", "iterable", "resumed", "resumed in a bar"])
def test_windows_of_any_loader(kind: str) -> None:
    """The size is known from the length, by looking ahead where there is none, and in an epoch gone on with."""
    loader: Any = list(range(7))
    if kind == "loader":
        loader = dw.shard_loader(DataLoader(TensorDataset(torch.arange(7)), shuffle=True))
    elif kind == "generator":
        loader = (number for number in range(7))
    elif kind == "iterable":
        loader = DataLoader(Stream(7), batch_size=None)
    elif kind.startswith("resumed"):
        loader = dw.shard_loader(DataLoader(TensorDataset(torch.arange(10))), seed=1)
        for _ in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
        loader = dw.shard_loader(DataLoader(TensorDataset(torch.arange(10))), seed=1)
        loader.load_state_dict(state)
        loader = Bar(loader) if kind == "resumed in a bar" else loader
    windows = [(window.size, window.index, window.last) for _, window in dw.accumulate(loader, 3, nn.Linear(1, 1))]
    assert windows == [
        (3, 0, False), (3, 1, False), (3, 2, True),
        (3, 0, False), (3, 1, False), (3, 2, True),
        (1, 0, True),
    ]  # fmt: skip


def test_a_loader_that_ends_early_is_an_error() -> None:
    """A length that promises more than comes would divide the last window wrongly."""

    class Short(list[int]):
        def __len__(self) -> int:
            return 5

    with pytest.raises(LoaderError, match="2 micro-batches"):
        for _ in dw.accumulate(Short([1, 2, 3]), 3, nn.Linear(1, 1)):
            pass
    assert not current_world().part(Windows).under_way


def test_leaving_early_sets_the_model_free() -> None:
    """After a break in the middle of a window the next backward exchanges again."""

    def on_rank() -> list[float]:
        net = network()
        model = dw.wrap_model(net)
        x = torch.full((1, 4), dw.rank() + 1.0).double()
        for _ in dw.accumulate([x] * 4, 4, model):
            model(x).sum().backward()
            break
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.sum().item() for p in net.parameters() if p.grad is not None]

    one, other = run_ranks(on_rank, 2)
    assert one == other


def test_a_step_in_the_middle_of_a_window_is_refused() -> None:
    """``optimizer_step`` before the window's last micro-batch would use gradients of this rank alone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, _ in dw.accumulate([1, 2], 2, model):
        model(torch.ones(1, 4).double()).sum().backward()
        with pytest.raises(ModelError, match="step after micro-batch 1"):
            dw.optimizer_step(optimizer)
        break


def test_a_loop_that_was_left_does_not_count() -> None:
    """A loop that was left in the middle of a window, and whose iterator somebody holds, does not disturb the next."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = dw.accumulate([1, 2, 3, 4], 4, model)
    next(held)
    for _, window in dw.accumulate([1, 2], 2, model):
        dw.scale_loss(model(torch.ones(1, 4).double()).sum(), 1).backward()
        if window.last:
            dw.optimizer_step(optimizer)
    assert dw.scale_loss(torch.tensor(6.0), 3) == dw.scale_loss(torch.tensor(6.0), 3) == 2.0
    held.close()


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "2"])
def test_wrong_windows_are_refused(steps: Any) -> None:
    """A window is a positive whole number; refused at the call, not at the first batch."""
    with pytest.raises(OptionError, match="whole number from 1"):
        dw.accumulate([1], steps, nn.Linear(1, 1))


def test_wrong_arguments_are_named() -> None:
    """A list of optimizers, losses that are no scalars, negative counts and a second call are errors."""
    with pytest.raises(OptionError, match="not a SGD"):
        dw.accumulate([1], 1, [torch.optim.SGD([torch.zeros(1)], lr=1.0)])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="a scalar"):
        dw.scale_loss(torch.ones(2), 2)
    with pytest.raises(OptionError, match="0 or more"):
        dw.scale_loss(torch.tensor(1.0), -1)
    assert dw.scale_loss(torch.tensor(0.0), 0).item() == 0
    for _ in dw.accumulate([1, 2], 2, nn.Linear(1, 1)):
        dw.scale_loss(torch.tensor(1.0), 1)
        with pytest.raises(ModelError, match="called twice"):
            dw.scale_loss(torch.tensor(1.0), 1)
        break


def test_in_one_process_it_is_the_plain_loop() -> None:
    """Without a world nothing is exchanged and the numbers are those of a hand-written loop."""
    model, twin = network(), network()
    for (x, y), window in dw.accumulate(tokens(), 4, model):
        loss_sum = nn.functional.cross_entropy(model(x), y, reduction="sum")
        dw.scale_loss(loss_sum, len(y)).backward()
        if window.last:
            break
    batch = [torch.cat(parts) for parts in zip(*tokens()[:4], strict=True)]
    nn.functional.cross_entropy(twin(batch[0]), batch[1]).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
