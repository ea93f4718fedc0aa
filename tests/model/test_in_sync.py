"""Proof that all ranks hold the same weights: after the first step, and on demand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torchs

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.model.checks.in_sync import fingerprint, first_difference
from distwrap.testing import run_ranks
from tests.slow import few

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 3), dw.rank() + 1.0) + torch.eye(2, 3)).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_knows_every_bit_and_place(dtype: torch.dtype) -> None:
    """One changed element, a swap, another shape or type give another fingerprint; layout in memory does not."""
    x = torch.arange(300_001).remainder(7).to(dtype)
    marks = {fingerprint(x)}
    assert fingerprint(x.clone()) == fingerprint(x)
    for place in (0, 150_000, 300_000):
        other = x.clone()
        other[place] = ~other[place] if dtype is torch.bool else other[place] + 3
        marks.add(fingerprint(other))
    swapped = torch.cat([x[140_000:], x[:140_000]])
    marks |= {fingerprint(swapped), fingerprint(x[:-1]), fingerprint(x.reshape(1, -1))}
    marks.add(fingerprint(torch.zeros(0, dtype=dtype)))
    assert len(marks) == 8
    square = x[:9].reshape(3, 3)
    assert fingerprint(square.t().contiguous().t()) == fingerprint(square)
    assert fingerprint(x[1:]) == fingerprint(x[1:].clone())


def test_fingerprints_of_round_numbers_differ() -> None:
    """Small whole numbers and powers of two, of which only the high bits differ, are told apart, two at a time."""
    for dtype in (torch.float64, torch.float32, torch.float16):
        values = [torch.full((2,), number, dtype=dtype) for number in (0, *(2.0**k for k in range(-10, 10)), 3, -1, -2)]
        assert len({fingerprint(value) for value in values}) == len(values)


def test_differences_are_put_into_words() -> None:
    """The first tensor that differs, and which ranks hold which; where only the last bit may differ, more is needed."""
    same = [("a", (1, 2, 3.0), ""), ("b", (4, 2, 5.0), "")]
    other = [("a", (1, 2, 3.0), ""), ("b", (9, 2, 5.0 + 1e-7), "")]
    assert first_difference([same, same]) is None
    found = first_difference([same, other, same])
    assert found == (
        "'b' is the first that differs: ranks 0, 2 one whose absolute values sum to 5 and rank 1 one whose absolute "
        "values sum to 5.0000001"
    )
    assert first_difference([same, other], exact=False) is None
    assert first_difference([same, same[:1]]) == "rank 1 does not hold the same tensors as rank 0 (b)"


def test_on_demand_the_first_different_tensor_and_ranks_are_named() -> None:
    """A weight that one rank changed is named on every rank; running statistics may differ."""

    def on_rank() -> str:
        model: Any = dw.wrap_model(network())
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dw.assert_in_sync(model)
        dw.assert_in_sync(dw.unwrap_model(model))
        if dw.rank() == 1:
            with torch.no_grad():
                model[2].bias += 1e-6
        with pytest.raises(ModelError) as refusal:
            dw.assert_in_sync(model)
        return str(refusal.value)

    texts = run_ranks(on_rank, 3)
    assert len(set(texts)) == 1
    assert "Sequential is not the same on all ranks: '2.bias' is the first that differs: ranks 0, 2 one" in texts[0]


def test_what_is_no_model_is_refused() -> None:
    """A tensor is answered with what to give, in one process and on several."""

    def on_rank() -> None:
        with pytest.raises(ModelError, match="not a Tensor"):
            dw.assert_in_sync(torch.ones(1))  # type: ignore[arg-type]

    on_rank()
    run_ranks(on_rank, 2)


def loosely(model: nn.Module, steps: int = 3, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        step(model, optimizer)
        dw.barrier()  # so that the word of the first step is there at the next


def own_learning_rate(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (dw.rank() + 1))
    for _ in range(3):
        step(model, optimizer)
        dw.barrier()


def own_noise(model: nn.Module) -> None:
    torch.manual_seed(dw.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-4 * torch.randn_like(parameter)
        step(model, optimizer)
        dw.barrier()


def a_weight_outside(model: nn.Module) -> None:
    temperature = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([*model.parameters(), temperature], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.full((2, 3), dw.rank() - 1.0) + torch.eye(2, 3)
        (model(x) * temperature).sum().backward()
        optimizer.step()
        dw.barrier()


def a_step_of_one_rank(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.eye(2, 3) + dw.rank()).sum().backward()
        if dw.rank() == 0:
            optimizer.step()
        dw.barrier()


def an_unwrapped_head(model: nn.Module) -> None:
    head = nn.Linear(1, 5)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for _ in range(3):
        head(model(torch.eye(2, 3) + dw.rank())).pow(2).sum().backward()
        optimizer.step()
        dw.barrier()


WRONG: dict[Callable[[nn.Module], None], str] = {
    own_learning_rate: "'the learning rate of SGD, group 0' is the first that differs: rank 0 0.1 and rank 1 0.2",
    own_noise: "Sequential: '0.weight' is the first that differs: rank 0 one",
    a_weight_outside: "'tensor 6 of Adam' is the first that differs",
    a_step_of_one_rank: "Either one of these ranks took a step with this optimizer that the other did not",
    an_unwrapped_head: "That tensor is 'weight' of Linear, of shape (5, 1), and wrap_model() has not wrapped this",
}


@pytest.mark.parametrize("way", few(WRONG, 3), ids=lambda way: way.__name__)
def test_ranks_that_differ_are_found_soon(way: Callable[[nn.Module], None]) -> None:
    """A run whose ranks train apart ends within its first steps, with the tensor that differs."""

    def on_rank() -> None:
        way(dw.wrap_model(network()))

    with pytest.raises(ModelError) as refusal:
        run_ranks(on_rank, 2)
    assert "after 1 " in str(refusal.value)
    assert "the ranks do not hold the same weights" in str(refusal.value)
    assert WRONG[way] in str(refusal.value)


def fitted(closure_mean: bool) -> list[float]:
    """Return the weights that L-BFGS with a line search finds in a few steps."""
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
    samples = torch.randn(16, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = dw.split(samples)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 3 * x.prod(1, keepdim=True).sin()).pow(2).mean()
        loss.backward()
        return dw.mean(loss) if closure_mean else loss

    for _ in range(4):
        optimizer.step(closure)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_a_closure_that_returns_the_mean_of_all_ranks_fits_as_one_process_does() -> None:
    """L-BFGS chooses its steps by the closure's loss: with all ranks' mean two ranks find one process's weights."""
    alone = fitted(True)
    for weights in run_ranks(fitted, 2, True):
        torch.testing.assert_close(weights, alone, rtol=1e-7, atol=1e-9)


def test_a_closure_that_returns_one_ranks_loss_is_named() -> None:
    """Where each rank's line search sees its own loss, the error says what the closure must return."""
    with pytest.raises(ModelError, match="LBFGS chooses"):
        run_ranks(fitted, 2, False)


def test_an_optimizer_of_a_copy_is_refused() -> None:
    """An optimizer whose tensors are a copy's would train nothing, and says so at its first step."""

    def on_rank() -> str:
        net = network()
        optimizer = torch.optim.SGD(copy.deepcopy(net).parameters(), lr=0.1)
        model = dw.wrap_model(net)
        optimizer.step()  # before any gradient, as some do to please a scheduler
        with pytest.raises(ModelError) as refusal:
            step(model, optimizer)
        return str(refusal.value)

    assert all("holds none of the parameters of Sequential" in text for text in run_ranks(on_rank, 2))


def test_one_hook_a_run_is_in_the_loop() -> None:
    """However many models and optimizers there are, one hook of ours looks at steps, and none after the run."""

    def on_rank() -> tuple[int, int]:
        model, other = dw.wrap_model(network()), dw.wrap_model(network())
        loosely(model, 3)
        loosely(other, 3)
        during = len(torchs._global_optimizer_pre_hooks) + len(torchs._global_optimizer_post_hooks)
        dw.teardown_process_group()
        return during, len(torchs._global_optimizer_pre_hooks) + len(torchs._global_optimizer_post_hooks)

    assert run_ranks(on_rank, 2) == [(1, 0)] * 2


def test_what_ddp_is_told_to_ignore_may_differ() -> None:
    """A parameter that torch's own mark leaves to each rank is no difference."""

    def on_rank() -> None:
        net = network()
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.bias"])
        model: Any = dw.wrap_model(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.full((2, 3), dw.rank() + 1.0) + torch.eye(2, 3)) * (dw.rank() + 1)).sum().backward()
            optimizer.step()
            dw.barrier()
        dw.assert_in_sync(model)
        assert len(set(dw.gather_object(net[2].bias.item()))) == 2  # type: ignore[union-attr, operator]

    run_ranks(on_rank, 2)


def test_correct_loops_pass() -> None:
    """Several optimizers, one optimizer of several models, momentum, and weights averaged by hand are in order."""

    def on_rank() -> None:
        one, two = dw.wrap_model(network()), dw.wrap_model(network())
        outside = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters(), outside], lr=0.01, momentum=0.9)
        last = torch.optim.Adam(one.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            x = torch.full((2, 3), dw.rank() + 1.0) + torch.eye(2, 3)
            ((one(x) + two(x)) * outside).sum().backward()
            assert outside.grad is not None
            outside.grad = dw.reduce(outside.grad)
            optimizer.step()
            last.step()
            dw.barrier()
        dw.assert_in_sync(one)
        dw.assert_in_sync(two)

    run_ranks(on_rank, 2)
