"""Each weight algorithm against NumPy: replicas that descend quadratics of their own, through wrap_model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distwrap import consolidate, distributed, wrap_model
from distwrap.comm import (
    Algorithm,
    AsyncAveraging,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    pause,
    traffic,
)
from distwrap.errors import OptionError
from distwrap.group.world import rank, world_size
from distwrap.model.wrapped_models import handle_of
from distwrap.testing import run_ranks
from tests.comm import references
from tests.slow import MORE_RANKS, nightly, slow

RANKS = [1, 2, slow(4, why=MORE_RANKS), *(nightly(ranks, row="products", why="four ranks show it") for ranks in (3, 5))]
SCALES = [1e-12, 1.0, 1e12]
STEPS, LR = 13, 0.1
SIZES = [37, 5, 58]
PARTS = [slice(0, 42), slice(42, 100)]  # as `fragments` cuts these sizes in two

ALGORITHMS: dict[str, tuple[Algorithm, type[references.Replicas]]] = {
    "local_sgd": (LocalSGD(sync_every=3), references.LocalSGD),
    "diloco": (DiLoCo(sync_every=3), references.DiLoCo),
    "streaming diloco": (DiLoCo(sync_every=4, fragments=2, delay=1, mixing=0.25), references.StreamingDiLoCo),
    "decentralized": (Decentralized(), references.DecentralizedAll),
    "shift_one": (Decentralized(peer_selection="shift_one"), references.ShiftOne),
    "low_precision_decentralized": (LowPrecisionDecentralized(), references.Ring),
}


class Quadratic(nn.Module):
    """Its loss is 0.5·|w - target|², so that the gradient is w - target."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in SIZES)

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * (torch.cat(list(self.w)) - target).square().sum()


def target_of(number: int, scale: float) -> torch.Tensor:
    return torch.randn(100, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * scale


def flat(model: nn.Module) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().copy()


def _descend(algorithms: dict[str, Algorithm], scale: float) -> dict[str, tuple[list[Any], Any, Any]]:
    found = {}
    for name, algorithm in algorithms.items():
        model = wrap_model(Quadratic(), comm=algorithm)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)  # after wrapping, as a checkpoint that is loaded
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        target, history = target_of(rank(), scale), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(target).backward()
            optimizer.step()
            history.append(flat(model))
        with consolidate(model):
            mean = flat(model)
        found[name] = history, mean, flat(model)
    return found


def _descend_at_each_scale(algorithms: dict[str, Algorithm]) -> list[dict[str, tuple[list[Any], Any, Any]]]:
    return [_descend(algorithms, scale) for scale in SCALES]


@pytest.mark.parametrize("ranks", RANKS)
def test_like_the_reference(ranks: int) -> None:
    """Every algorithm is its formula, step by step and rank by rank, with small and with large numbers."""
    chosen = {name: algorithm for name, (algorithm, _) in ALGORITHMS.items() if name != "shift_one" or ranks % 2 == 0}
    everyone = run_ranks(_descend_at_each_scale, ranks, chosen)
    for index, scale in enumerate(SCALES):
        _compare([found[index] for found in everyone], ranks, scale)


def _compare(everyone: list[dict[str, tuple[list[Any], Any, Any]]], ranks: int, scale: float) -> None:
    for name in everyone[0]:
        kind = ALGORITHMS[name][1]
        targets = [target_of(number, scale).numpy() for number in range(ranks)]
        start = np.full(100, scale)
        if ranks == 1:  # a plain step
            replicas = references.Replicas(start, targets, LR)
        elif kind is references.StreamingDiLoCo:
            replicas = references.StreamingDiLoCo(start, targets, LR, PARTS)
        else:
            replicas = kind(start, targets, LR)
        quantised = name == "low_precision_decentralized"
        for step in range(STEPS):
            replicas.step()
            for number in range(ranks):
                got, expected = everyone[number][name][0][step], replicas.w[number]
                worst = np.abs(got - expected).max()
                assert worst <= (2e-2 if quantised else 1e-9) * scale, (name, scale, step, number, worst)
        means = [everyone[number][name][1] for number in range(ranks)]
        assert all(np.array_equal(mean, means[0]) for mean in means), (name, scale)
        own = [everyone[number][name][2] for number in range(ranks)]
        assert np.allclose(means[0], np.mean(own, axis=0), rtol=1e-12, atol=0), (name, scale)


def test_consolidate_gives_the_own_weights_back() -> None:
    for history, _, after in (
        found["local_sgd"] for found in run_ranks(_descend, 2, {"local_sgd": LocalSGD(sync_every=5)}, 1.0)
    ):
        assert np.array_equal(history[-1], after)


class Linear(nn.Module):
    """Its gradient is the same everywhere, so a replica's progress does not depend on when it was averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(101, dtype=torch.float64))

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        return (self.w * slope).sum()


def _steps_at_own_pace(interval_ms: int, steps: Sequence[int], pauses: bool) -> tuple[Any, int]:
    model = wrap_model(Linear(), comm=AsyncAveraging(sync_interval_ms=interval_ms))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    slope = target_of(rank(), 1.0)[:1].expand(101)
    for step in range(steps[rank()]):
        optimizer.zero_grad()
        model(slope).backward()
        optimizer.step()
        time.sleep(0.002 * (1 + rank()))
        if pauses and step == 5:
            with pause(model):
                before = flat(model)
                time.sleep(0.02)
                assert np.array_equal(flat(model), before)
    exchange: Any = handle_of(model).exchange
    consolidate(model)
    return flat(model), exchange.rounds


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("ranks", [2, *(nightly(ranks, row="products", why="two ranks show it") for ranks in (3, 4))])
def test_async_loses_no_progress_whatever_the_pace(ranks: int, pauses: bool) -> None:
    """A mean moves weights from rank to rank and makes none: the final mean is known, though the rounds are not."""
    steps = [20 + 13 * number for number in range(ranks)]
    everyone = run_ranks(_steps_at_own_pace, ranks, 3, steps, pauses)
    progress = [-float(target_of(number, 1.0)[0]) * steps[number] for number in range(ranks)]
    for weights, rounds in everyone:
        assert rounds >= 2
        assert np.array_equal(weights, everyone[0][0])
        assert np.allclose(weights, np.mean(progress), rtol=1e-9, atol=1e-9)


def _goes_on_after_consolidate() -> list[float]:
    model = wrap_model(Linear(), comm=AsyncAveraging(sync_interval_ms=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    for epoch in range(3):
        for _ in range(4 + rank()):
            optimizer.zero_grad()
            model(torch.full((101,), float(rank() + 1), dtype=torch.float64)).backward()
            optimizer.step()
        if epoch == 1:
            consolidate(model)
            seen.append(model.w[0].item())
        else:
            with consolidate(model):
                seen.append(model.w[0].item())
    return seen


def test_async_goes_on_after_consolidate() -> None:
    first, second = run_ranks(_goes_on_after_consolidate, 2)
    assert first == second == pytest.approx([-7.0, -14.0, -21.0])  # (4·1 + 5·2) / 2 an epoch


def _descend_with_calls(algorithm: Algorithm, calls: bool) -> list[float]:
    model = wrap_model(Quadratic(), comm=algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(target_of(rank(), 1.0)).backward()
        optimizer.step()
        if calls and (rank() == 0 or step % 2):  # also where the other rank makes none
            distributed(lambda: None)()
    found: list[float] = flat(model).tolist()
    return found


@pytest.mark.parametrize("name", ["streaming diloco", "decentralized"])
def test_a_decorated_call_inside_changes_nothing(name: str) -> None:
    """A decorated function that the loop calls joins, and leaves what is under way alone."""
    plain, called = (run_ranks(_descend_with_calls, 2, ALGORITHMS[name][0], calls) for calls in (False, True))
    assert plain == called


def _warm_up(kinds: list[Callable[..., Algorithm]]) -> list[tuple[Any, Any]]:
    return [_warm_up_of(kind(warmup_steps=4)) for kind in kinds]


def _warm_up_of(algorithm: Algorithm) -> tuple[Any, Any]:
    model = wrap_model(Quadratic(), comm=algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        model(target_of(rank(), 1.0)).backward()
        optimizer.step()
        found.append(flat(model))
    return found[3], found[4]


def test_the_warm_up_averages_gradients() -> None:
    """Every algorithm of weights is plain DDP for `warmup_steps`, and goes its own way after them."""
    kinds = [LocalSGD, DiLoCo, Decentralized, LowPrecisionDecentralized, AsyncAveraging]
    w, target = np.ones(100), np.mean([target_of(number, 1.0).numpy() for number in range(2)], axis=0)
    for _ in range(4):
        w = w - LR * (w - target)
    own = w - LR * (w - target_of(0, 1.0).numpy())
    for kind, first, second in zip(kinds, *run_ranks(_warm_up, 2, kinds), strict=True):
        assert np.allclose(first[0], w), kind
        assert np.array_equal(first[0], second[0]), kind
        assert kind is LowPrecisionDecentralized or np.allclose(first[1], own), kind


def test_a_quantised_outer_step_follows_the_full_one() -> None:
    """Over many steps, as the error of one outer step is fed back into the next."""
    most = {"16bit": 0.02, "8bit": 0.05, "1bit": 1.5}
    outer: dict[str, Algorithm] = {"full": DiLoCo(sync_every=1, outer_momentum=0.5)}
    for compression in most:
        outer[compression] = DiLoCo(sync_every=1, outer_momentum=0.5, compression=compression)
    means = {name: mean for name, (_, mean, _) in run_ranks(_descend, 2, outer, 1.0)[0].items()}
    for compression, allowed in most.items():
        assert 0 < np.abs(means["full"] - means[compression]).max() < allowed, compression


def _bytes_of_each(algorithms: list[Algorithm]) -> list[int]:
    return [_bytes_of(algorithm) for algorithm in algorithms]


def _bytes_of(algorithm: Algorithm) -> int:
    model = wrap_model(Quadratic(), comm=algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(13):  # the last exchange of twelve has come back
        optimizer.zero_grad()
        model(target_of(rank(), 1.0)).backward()
        optimizer.step()
    return traffic(model).sent


def test_nothing_is_sent_between_two_exchanges() -> None:
    weights = 100 * 8
    algorithms = [LocalSGD(sync_every=4), LocalSGD(sync_every=100), Decentralized(communication_interval=6)]
    assert run_ranks(_bytes_of_each, 2, algorithms) == [[3 * weights, 0, 2 * weights]] * 2


def test_shift_one_refuses_an_odd_number_of_ranks() -> None:
    with pytest.raises(OptionError, match="is an odd number of them"):
        run_ranks(_bytes_of, 3, Decentralized(peer_selection="shift_one"))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: LocalSGD(sync_every=0), "whole number"),
        (lambda: DiLoCo(delay=40), "less than sync_every"),
        (lambda: DiLoCo(compression="8 bit"), "8bit"),
        (lambda: DiLoCo(mixing=2.0), "from 0.0 to 1.0"),
        (lambda: Decentralized(peer_selection="shift"), "shift_one"),
        (lambda: AsyncAveraging(sync_interval_ms=-1), "from 0"),
        (lambda: LocalSGD(warmup_steps=-1), "from 0"),
    ],
)
def test_wrong_options_are_refused_at_once(make: Callable[[], Algorithm], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        make()


def test_a_world_of_one() -> None:
    assert world_size() == 1
    net = nn.Linear(1, 1)
    model = wrap_model(net, comm="diloco")
    assert model.module is net
    with consolidate(model):
        assert traffic(model).sent == 0


def _dropped_while_it_averages() -> int:
    import gc
    import threading

    before = threading.active_count()
    for _ in range(3):
        model = wrap_model(Linear(), comm=AsyncAveraging(sync_interval_ms=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(5):
            model(torch.ones(101, dtype=torch.float64)).backward()
            optimizer.step()
        del model, optimizer
        gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return threading.active_count() - before


@pytest.mark.processes("counts a rank's threads")
def test_async_ends_with_its_model() -> None:
    """Without a pause first: no thread is left, and nobody waits for long."""
    assert run_ranks(_dropped_while_it_averages, 2) == [0, 0]


def _consolidated_in_a_pause() -> list[bool]:
    model = wrap_model(Linear(), comm=AsyncAveraging(sync_interval_ms=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(101, dtype=torch.float64)).backward()
    optimizer.step()
    exchange: Any = handle_of(model).exchange
    running = [exchange._runs]
    with pause(model):
        with consolidate(model):
            running.append(exchange._runs)
        running.append(exchange._runs)
    return [*running, exchange._runs]


def test_a_consolidate_inside_a_pause_does_not_end_it() -> None:
    assert run_ranks(_consolidated_in_a_pause, 2) == [[True, False, False, True]] * 2


@pytest.mark.parametrize("comm", ["decentralized", "local_sgd"])
def test_a_static_graph_is_refused(comm: str) -> None:
    """DDP exchanges gradients in its first backward then, whatever it is told; torch ends at an assertion."""

    def on_rank() -> None:
        with pytest.raises(OptionError, match=r"static_graph=True .* exchanges weights"):
            wrap_model(nn.Linear(3, 1), comm=comm, static_graph=True)

    run_ranks(on_rank, 2)
