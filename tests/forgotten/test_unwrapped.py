"""A model that nobody has wrapped is refused at its optimizer's first step, before the weights change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError
from distwrap.testing import run_ranks, simulate
from tests.forgotten.nets import Net


def inputs(step: int, share: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + share))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, share: int | None = None) -> list[float]:
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(step, dw.rank() if share is None else share)).square().mean().backward()
        optimizer.step()
    return [number for parameter in model.parameters() for number in parameter.flatten().tolist()]


def forgotten(shares: bool, before: Callable[[], object] = lambda: None) -> str:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start = [parameter.clone() for parameter in net.parameters()]
    before()
    with pytest.raises(ModelError) as refusal:
        steps(net, optimizer, share=None if shares else 0)
    assert all(torch.equal(one, other) for one, other in zip(start, net.parameters(), strict=True))
    return str(refusal.value)


@pytest.mark.parametrize("shares", [True, False], ids=["a share each", "the same data"])
def test_a_forgotten_wrap_model(shares: bool) -> None:
    """The error names the model's class, and where the optimizer was made; the weights are as they were."""
    line = forgotten.__code__.co_firstlineno + 2
    for rank, words in enumerate(run_ranks(forgotten, 2, shares)):
        assert words.startswith(f"rank {rank}: this SGD, made at test_unwrapped.py:{line}, steps Net, which")
        assert f"rank {1 - rank} has other gradients" in words if shares else "other gradients" not in words
        assert (
            ": each of the 2 ranks would train a Net of its own (DW104). Write model = wrap_model(model) before"
            in words
        )
        assert words.endswith("say model = local_model(model).")


@pytest.mark.slow("others of its kind are in `make test`")
def test_after_other_collectives() -> None:
    """Where gradients may have been averaged by hand, the ranks compare them."""
    for words in run_ranks(forgotten, 2, True, dw.barrier):
        assert "which wrap_model() has not wrapped, and rank" in words
        assert "has other gradients" in words


def test_wrappers_that_nobody_uses(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A loop that forgets what `wrap_model` and `shard_loader` return goes on, and is told to use it."""

    def on_rank() -> None:
        net = Net()
        dw.wrap_model(net)
        steps(net, torch.optim.SGD(net.parameters(), lr=0.1), share=0)

    monkeypatch.delenv("DISTWRAP_QUIET")
    run_ranks(on_rank, 2)
    told = capfd.readouterr().err
    assert "Net is not wrapped" in told
    assert "all 2 ranks do the same work. Write model = wrap_model(model) and loader = shard_loader(loader)" in told


def test_made_outside_of_the_function() -> None:
    """The words say that a model is wrapped inside the function that the ranks run."""
    net = dw.wrap_model(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def on_rank() -> str:
        with pytest.raises(ModelError) as refusal:
            steps(net, optimizer)
        return str(refusal.value)

    assert "before the loop, in the function that the ranks run, and train" in run_ranks(on_rank, 2)[0]


@pytest.mark.slow("waits for a limit to pass")
def test_one_rank_alone() -> None:
    """A rank that trains alone waits a moment for the others, and goes on."""

    def on_rank() -> list[float]:
        dw.barrier()
        net = Net()
        return steps(net, torch.optim.SGD(net.parameters(), lr=0.1)) if dw.rank() == 1 else []

    net = Net()
    expected = steps(net, torch.optim.SGD(net.parameters(), lr=0.1), share=1)
    assert run_ranks(on_rank, 2, timeout=60)[1] == pytest.approx(expected, abs=1e-7)


@pytest.mark.slow("waits for a limit to pass")
def test_a_rank_that_comes_late() -> None:
    """Where another rank has waited in vain, and gone on, the late one is refused."""

    def on_rank() -> None:
        if dw.rank() == 1:
            time.sleep(7)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        steps(net, optimizer)
        if dw.rank() == 0:
            time.sleep(3)  # until the late one has told
            steps(net, optimizer)

    with pytest.raises(ModelError, match="steps Net"):
        run_ranks(on_rank, 2, timeout=60)


class Trainer:
    """Holds an optimizer as an attribute."""

    def __init__(self) -> None:
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def fit(self) -> None:
        steps(self.net, self.optimizer)


def test_the_optimizer_of_an_object() -> None:
    """The line is found where an attribute was set."""

    def on_rank() -> str:
        with pytest.raises(ModelError) as refusal:
            Trainer().fit()
        return str(refusal.value)

    line = Trainer.__init__.__code__.co_firstlineno + 2
    assert f"this Adam, made at test_unwrapped.py:{line}, steps" in run_ranks(on_rank, 2)[0]


def test_an_optimizer_with_a_closure() -> None:
    """One that computes gradients inside its step is refused before that."""

    def on_rank() -> str:
        net = Net()
        optimizer = torch.optim.LBFGS(net.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(inputs(0, dw.rank())).square().mean()
            loss.backward()
            return loss

        with pytest.raises(ModelError) as refusal:
            optimizer.step(closure)
        assert all(parameter.grad is None for parameter in net.parameters())
        return str(refusal.value)

    assert "this LBFGS, made at" in run_ranks(on_rank, 2)[0]


@pytest.mark.slow("others of its kind are in `make test`")
def test_an_optimizer_with_a_closure_that_steps_once() -> None:
    """Where gradients may be averaged by hand in the closure, they are compared after the step."""

    def on_rank(average: bool) -> list[float]:
        dw.barrier()
        net = Net()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(inputs(0, dw.rank())).square().mean()
            loss.backward()
            for parameter in net.parameters() if average else ():
                parameter.grad = dw.reduce(parameter.grad)
            return dw.reduce(loss) if average else loss

        optimizer.step(closure)
        return net.layer.bias.tolist()

    one, other = run_ranks(on_rank, 2, True)
    assert one == other
    with pytest.raises(ModelError, match="steps Net"):
        run_ranks(on_rank, 2, False)


@pytest.mark.slow("others of its kind are in `make test`")
def test_without_the_decorator() -> None:
    """A script that joins by itself is told too, once it uses `shard_loader`."""

    def on_rank() -> str:
        dw.shard_loader(torch.utils.data.DataLoader([1, 2, 3, 4]))
        return forgotten(True)

    assert "steps Net" in run_ranks(on_rank, 2)[1]


def by_hand(net: nn.Module) -> nn.Module:
    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return net


def test_what_is_right_is_left_alone() -> None:
    """torch's own DDP and gradients that are averaged by hand train as one process does on all data."""

    def on_rank() -> list[list[float]]:
        ways: list[Callable[[nn.Module], nn.Module]] = [dw.wrap_model, nn.parallel.DistributedDataParallel, by_hand]
        found = []
        for way in ways:
            model = way(Net())
            found.append(steps(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        return found

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.cat([inputs(step, share) for share in range(2)])).square().mean().backward()
        optimizer.step()
    expected = [number for parameter in net.parameters() for number in parameter.flatten().tolist()]
    for found in run_ranks(on_rank, 2):
        for weights in found:
            assert weights == pytest.approx(expected, abs=1e-6)


def test_a_model_of_each_ranks_own() -> None:
    """`local_model` lets each rank train by itself, as one process does on that data."""

    def on_rank() -> list[list[float]]:
        found = []
        for say in (dw.local_model, lambda net: net):
            model = say(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if say is not dw.local_model:
                dw.wrap_optimizer(optimizer, apart=True)
            found.append(steps(model, optimizer))
        return found

    for rank, found in enumerate(run_ranks(on_rank, 2)):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(inputs(step, rank)).square().mean().backward()
            optimizer.step()
        expected = [number for parameter in net.parameters() for number in parameter.flatten().tolist()]
        assert found == [pytest.approx(expected, abs=1e-7)] * 2


@pytest.mark.slow("others of its kind are in `make test`")
def test_a_part_of_each_ranks_own_in_one_optimizer() -> None:
    """What `local_model` names may differ beside a wrapped model, which the ranks still train together."""

    def on_rank() -> tuple[list[float], list[float]]:
        body, head = dw.wrap_model(Net()), dw.local_model(nn.Linear(3, 1))
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            head(body(inputs(step, dw.rank()))).square().mean().backward()
            optimizer.step()
        return body.layer.bias.tolist(), head.bias.tolist()

    (body, head), (same, other) = run_ranks(on_rank, 2)
    assert body == same
    assert head != other


@pytest.mark.slow("others of its kind are in `make test`")
def test_in_a_function_of_one_rank() -> None:
    """What rank 0 trains for itself inside `rank_zero_only` is its own affair."""

    @dw.rank_zero_only(broadcast=True)
    def probe() -> Any:
        net = Net()
        return steps(net, torch.optim.SGD(net.parameters(), lr=0.1))

    first, second = run_ranks(lambda: probe(), 2)
    assert first == second


def attacked() -> str:
    model = dw.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = inputs(step, dw.rank())
        noise = torch.zeros_like(x, requires_grad=True)
        attack = torch.optim.SGD([noise], lr=0.1)
        for _ in range(10):
            (noise.grad,) = torch.autograd.grad(-model(x + noise).square().sum(), noise)
            attack.step()
            attack.zero_grad()
        model(x + noise.detach()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return "fine"


def test_an_attack_on_each_ranks_own_samples() -> None:
    """Tensors in no module, of an optimizer that lasts for one batch, may differ."""
    assert run_ranks(attacked, 2) == ["fine", "fine"]


def averaged_then_wrapped() -> str:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(inputs(step, dw.rank())).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = dw.reduce(parameter.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()
    dw.wrap_model(Net())
    return "fine"


def wrapped_at_second_try() -> str:
    net = Net()
    wrap: Any = dw.wrap_model
    with pytest.raises(TypeError) as refusal:
        wrap(net, process_group="x")
    steps(by_hand(net), torch.optim.SGD(net.parameters(), lr=0.1))
    return "fine" if refusal.tb is not None else ""  # which has held the wrapper


@pytest.mark.parametrize("program", [averaged_then_wrapped, wrapped_at_second_try])
def test_beside_a_wrapper_that_is_not_built(program: Callable[[], str]) -> None:
    """A wrapper that another simulated rank builds, or that was refused its model, is not looked at."""
    ranks = run_ranks if program is wrapped_at_second_try else simulate
    assert ranks(program, 2) == ["fine", "fine"]


@pytest.mark.parametrize(
    ("given", "words"),
    [(nn.Parameter(torch.ones(1)), "takes an nn.Module, not a Parameter"), (Net, "not a type")],
    ids=["a parameter", "a class"],
)
def test_local_model_refuses(given: Any, words: str) -> None:
    """What is no module is refused."""
    with pytest.raises(ModelError, match=words):
        dw.local_model(given)


@pytest.mark.slow("others of its kind are in `make test`")
def test_local_model_of_a_wrapped_one() -> None:
    """What all ranks train together is nobody's own."""

    def on_rank() -> None:
        with pytest.raises(ModelError, match="in a wrapper"):
            dw.local_model(dw.wrap_model(Net()))

    run_ranks(on_rank, 2)


@pytest.mark.slow("others of its kind are in `make test`")
def test_a_local_model_is_wrapped_later() -> None:
    """What a rank has trained by itself may be wrapped, and is then trained together."""

    def on_rank() -> list[float]:
        net = dw.local_model(Net())
        steps(net, torch.optim.SGD(net.parameters(), lr=0.1))
        model = dw.wrap_model(dw.unwrap_model(net))
        found = steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dw.assert_in_sync(model)
        return found

    one, other = run_ranks(on_rank, 2)
    assert one == other


def test_local_model_in_one_process() -> None:
    """It is a no-op."""
    net = Net()
    assert dw.local_model(net) is net or dw.device().type != "cpu"
