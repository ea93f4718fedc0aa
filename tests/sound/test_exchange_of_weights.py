"""Weights that are exchanged under ``comm=``, whatever else the loop does with them between two exchanges."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError, OptionError
from distwrap.model.wrapped_models import handle_of
from distwrap.testing import run_ranks
from distwrap.versions import TORCH_RELEASE
from tests.slow import few

without_complex = pytest.mark.skipif(TORCH_RELEASE < (2, 7), reason="gloo of torch 2.6 knows no complex numbers")

STEPS = 13
LR = 0.1
WEIGHTS = [
    "local_sgd(sync_every=1)",
    "local_sgd(sync_every=3)",
    "diloco(sync_every=3)",
    "diloco(sync_every=4, fragments=2, delay=1, mixing=0.25)",
    "decentralized",
    "low_precision_decentralized",
]
Step = Callable[[], object]


class Quadratic(nn.Module):
    """Its gradient is w - target, of each rank another target."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.ones(size, dtype=dtype)) for size in (7, 2, 9))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * (torch.cat(list(self.w)) - target).abs().square().sum()


def target(number: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(18, generator=torch.Generator().manual_seed(number), dtype=dtype)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def descend(model: nn.Module, step: Step, steps: int = STEPS) -> list[torch.Tensor]:
    """Train, and return the weights after each step."""
    history = []
    for _ in range(steps):
        model.zero_grad()
        model(target(dw.rank())).backward()
        step()
        history.append(flat(model))
    return history


# Optimizers


def one(model: Any) -> Step:
    return sgd(model.parameters()).step


def anew(model: Any) -> Step:
    """A new object for each step."""
    return lambda: sgd(model.parameters()).step()


def two(model: Any) -> Step:
    first, second = sgd(model.w[:1]), sgd(model.w[1:])
    return lambda: (first.step(), second.step())


def two_anew(model: Any) -> Step:
    return lambda: (sgd(model.w[2:]).step(), sgd(model.w[:2]).step())


def two_in_changing_order(model: Any) -> Step:
    optimizers = [sgd(model.w[:1]), sgd(model.w[1:])]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
        optimizers.reverse()

    return step


def overlapping(model: Any) -> Step:
    """The first holds all, but weights whose gradients are gone are left alone."""
    first, second = sgd(model.parameters()), sgd(model.w[1:])
    optimizers = [first, second]

    def step() -> None:
        optimizers.reverse()
        optimizers[0].step()
        if optimizers[0] is second:
            sgd(model.w[:1]).step()

    return step


class Around(torch.optim.Optimizer):
    """An optimizer that steps by another one, as those of sharpness-aware minimisation do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def around_another(model: Any) -> Step:
    return Around(sgd(model.parameters())).step


class Derived(torch.optim.SGD):
    """An optimizer whose step calls its base's, for which torch runs the hooks of steps twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def derived(model: Any) -> Step:
    return Derived(model.parameters(), lr=LR).step


def _by_each() -> dict[tuple[str, str], list[torch.Tensor]]:
    found = {}
    for comm in WEIGHTS:
        for make in (one, anew, two, two_anew, two_in_changing_order, overlapping, around_another, derived):
            model = dw.wrap_model(Quadratic(), comm=comm)
            found[comm, make.__name__] = descend(model, make(model))
    return found


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_weights_are_exchanged_whatever_optimizers_hold_them() -> None:
    """New objects, and several of them for parts of the model, train as one optimizer does."""
    for found in run_ranks(_by_each, 2):
        for (comm, name), history in found.items():
            for step, (got, wanted) in enumerate(zip(history, found[comm, "one"], strict=True)):
                assert torch.allclose(got, wanted, rtol=0, atol=1e-12), (comm, name, step)


def _beside(comm: str) -> None:
    """The optimizer also holds a parameter that is in no model."""
    model = dw.wrap_model(Quadratic(), comm=comm)
    shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = sgd([*model.parameters(), shift])
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(target(dw.rank())) + dw.rank() * shift.sum()).backward()
        optimizer.step()
        dw.barrier()
    raise AssertionError("the ranks have trained it apart to the end")


@pytest.mark.parametrize("comm", few(["local_sgd(sync_every=2)", "decentralized"], 1))
def test_a_parameter_outside_that_ranks_train_apart_is_noticed(comm: str) -> None:
    """Nothing brings it together."""
    with pytest.raises(ModelError, match="wrapped models: 'tensor 3 of SGD'"):
        run_ranks(_beside, 2, comm)


def _in_phases(comm: str) -> list[tuple[torch.Tensor, int]]:
    """The head is trained first, then all, then the body alone; the optimizers hold parts of what has gradients."""
    model: Any = dw.wrap_model(Quadratic(), comm=comm)
    found = []
    for parts in ([model.w[2:]], [model.w[:2], model.w[2:]], [model.w[:1]]):
        optimizers = [sgd(part) for part in parts]
        descend(model, lambda: [optimizer.step() for optimizer in optimizers], 8)  # noqa: B023
        found.append((flat(model), handle_of(model).exchange.steps))
    return found


@pytest.mark.parametrize("comm", few(["local_sgd(sync_every=1)", "decentralized"], 1))
def test_weights_that_are_trained_in_phases_stay_together(comm: str) -> None:
    first, second = run_ranks(_in_phases, 2, comm)
    apart = (target(0) - target(1)).abs().max()
    for (one_rank, _), (other, _) in zip(first, second, strict=True):
        assert (one_rank - other).abs().max() < 2 * LR * apart  # what a step or two bring, and not eight
    assert [steps for _, steps in first] == pytest.approx([8, 16, 24], abs=2)


# Changes by hand, and loads


def in_place(model: Any, loss: torch.Tensor) -> None:
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad


def of_the_data(model: Any, loss: torch.Tensor) -> None:
    loss.backward()
    for parameter in model.parameters():
        parameter.data.sub_(LR * parameter.grad.data)


def by_autograd_grad(model: Any, loss: torch.Tensor) -> None:
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter -= LR * gradient


def _by_hand(update: Callable[[Any, torch.Tensor], None], steps: int, before: int = 0) -> None:
    model = dw.wrap_model(Quadratic(), comm="local_sgd(sync_every=2)")
    descend(model, one(model), before)
    for _ in range(steps):
        model.zero_grad()
        update(model, model(target(dw.rank())))


@pytest.mark.parametrize("update", few([in_place, of_the_data, by_autograd_grad], 1))
def test_updates_by_hand_are_refused(update: Callable[[Any, torch.Tensor], None]) -> None:
    """At the end of the run, where there was never an optimizer."""
    with pytest.raises(ModelError, match="after 4 gradients"):
        run_ranks(_by_hand, 2, update, 5)


def test_a_run_that_goes_on_by_hand_is_refused() -> None:
    with pytest.raises(ModelError, match="after 32 gradients"):
        run_ranks(_by_hand, 2, in_place, 40, 3)


def _sharpness_aware() -> float:
    """Weights are moved by hand between two backwards of one step, and back; and are loaded before the first."""
    model: Any = dw.wrap_model(Quadratic(), comm="local_sgd(sync_every=1)")
    for _ in range(4):
        model(target(dw.rank())).backward()
        model.load_state_dict(model.state_dict())
    optimizer = sgd(model.parameters())
    for _ in range(40):
        for sign in (0.05, -0.05):
            model.zero_grad()
            model(target(dw.rank())).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(sign)
        optimizer.step()
    return float(flat(model).sum())


def test_weights_that_are_moved_by_hand_within_a_step_are_no_updates() -> None:
    first, second = run_ranks(_sharpness_aware, 2)
    assert first == second


def _shifted() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for comm in WEIGHTS:
        if "diloco" in comm:
            continue
        model = dw.wrap_model(Quadratic(), comm=comm)
        optimizer = sgd(model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            (flat_of(model) * target(dw.rank())).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
        own = flat(model)
        with dw.consolidate(model):
            found[comm] = own, flat(model)
    return found


def flat_of(model: Any) -> torch.Tensor:
    """The weights, through the model's forward so that DDP knows of it."""
    model(target(0))
    return torch.cat(list(model.w))


def test_what_is_done_to_the_weights_between_two_steps_is_kept() -> None:
    """As a clamp, a decay or a mean by hand. The gradients are constant, so the final mean is known."""
    progress = STEPS * (0.01 - LR * (target(0) + target(1)) / 2)
    for found in run_ranks(_shifted, 2):
        for comm, (_, mean) in found.items():
            worst = (mean - 1 - progress).abs().max()
            assert worst < (2e-2 if "low_precision" in comm else 1e-12), (comm, worst)


def _loaded() -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    found = {}
    for comm in WEIGHTS:
        if "fragments" in comm:  # of which the first ones begin later
            continue
        model: Any = dw.wrap_model(Quadratic(), comm=comm)
        start = copy.deepcopy(model.state_dict())
        torch.save(dw.unwrap_model(model), io.BytesIO())  # with its hooks
        copied = copy.deepcopy(dw.unwrap_model(model))
        optimizer = sgd(model.parameters())
        anew = descend(model, optimizer.step, 12)
        copied.load_state_dict(start)
        (model if "local" in comm else dw.unwrap_model(model)).load_state_dict(start)
        found[comm] = anew, descend(model, optimizer.step, 12)
    return found


def test_a_run_begins_anew_from_weights_that_are_loaded() -> None:
    """On every rank, after a multiple of the steps from one exchange to the next."""
    everyone = run_ranks(_loaded, 2)
    for comm in everyone[0]:
        wanted, got = (torch.stack([torch.stack(found[comm][turn]) for found in everyone]) for turn in (0, 1))
        if "low_precision" in comm:  # which brings the ranks together bit by bit, and begins as far apart as it was
            assert torch.allclose(got.mean(0), wanted.mean(0), atol=1e-2)
        else:
            assert torch.allclose(got, wanted, rtol=0, atol=1e-12), comm


# Complex weights


def _complex(comms: list[str | None], dtype: torch.dtype) -> dict[str | None, torch.Tensor]:
    found = {}
    for comm in comms:
        model = dw.wrap_model(Quadratic(dtype), comm=comm)
        optimizer = sgd(model.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            model(target(dw.rank(), dtype)).backward()
            optimizer.step()
        dw.consolidate(model)
        found[comm] = flat(model)
    return found


@without_complex
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_complex_weights_keep_both_their_parts(dtype: torch.dtype) -> None:
    """The loss is linear in its gradient, so that every algorithm of means ends where plain DDP does."""
    exact = [None, "allreduce", "bytegrad", "powersgd", "topk", "bf16", "bytegrad(hierarchical=True)"]
    exact += ["local_sgd(sync_every=3)", "local_sgd(warmup_steps=5, hierarchical=True)", "decentralized"]
    near = ["low_precision_decentralized", "diloco(sync_every=1, outer_lr=1.0, outer_momentum=0.0, compression='8bit')"]
    first, second = run_ranks(_complex, 2, [*exact, *near], dtype)
    for comm in (*exact, *near):
        assert torch.equal(first[comm], second[comm]), comm
        assert torch.allclose(first[comm], first[None], rtol=0, atol=1e-6 if comm in exact else 2e-2), comm


def _qadam_of_complex() -> None:
    model = dw.wrap_model(Quadratic(torch.complex64), comm="qadam")
    dw.wrap_optimizer(torch.optim.Adam(model.parameters()), model)


@without_complex
def test_qadam_refuses_complex_weights() -> None:
    with pytest.raises(OptionError, match="complex"):
        run_ranks(_qadam_of_complex, 2)


# Several backwards a step


def _backwards(losses: list[int], zero_between: bool, decay: float, options: str) -> torch.Tensor:
    model = dw.wrap_model(Quadratic(torch.float32), comm=f"qadam(warmup_steps=4{options})")
    adam = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=decay)
    optimizer = dw.wrap_optimizer(adam, model)
    for step in range(16):
        optimizer.zero_grad()
        for loss in losses:
            if zero_between:
                optimizer.zero_grad()
            random = torch.Generator().manual_seed(10 * step + dw.rank())
            noise = torch.randn(18, generator=random)
            (loss * model(target(dw.rank()).float() + noise)).backward()
        optimizer.step()
    return flat(model)


def _in_one_and_in_two() -> dict[tuple[float, str], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return {
        (decay, options): (
            _backwards([4], False, decay, options),
            _backwards([1, 3], False, decay, options),
            _backwards([1, 4], True, decay, options),
        )
        for decay in (0.0, 0.1)
        for options in ("", ", bits=1")
    }


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_qadam_adds_up_the_gradients_of_several_backwards() -> None:
    """After its warm-up too; and gradients that are set to zero in between are forgotten."""
    first, second = run_ranks(_in_one_and_in_two, 2)
    for (decay, options), (once, twice, zeroed) in first.items():
        assert torch.equal(twice, second[decay, options][1])
        assert (once - twice).abs().mean() < (0.1 if options else 0.02), (decay, options)
        assert options or (once - zeroed).abs().mean() < 0.02, (
            decay,
            options,
        )  # an error of one bit is not made up for


def _in_two_models(divided: bool) -> torch.Tensor:
    """Train two layers, in one model or each in its own, by one optimizer, with two backwards a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    models = [dw.wrap_model(part, comm="qadam(warmup_steps=2)") for part in (net if divided else [net])]
    optimizer = dw.wrap_optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    for step in range(8):
        for part in range(2):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(20 * step + 10 * part + dw.rank()))
            for model in models:
                x = model(x)
            x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(net)


def test_qadam_of_two_models_by_one_optimizer() -> None:
    """A gradient is added to its own model's average, whatever the other model has averaged since."""
    for whole, parts in run_ranks(lambda: [_in_two_models(divided) for divided in (False, True)], 2):
        assert (whole - parts).abs().max() < 0.003, "codes of other blocks differ by little"


def _left_over(zeroes: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(18, 1), comm="qadam(warmup_steps=3)")
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    assert dw.wrap_optimizer(adam, model) is adam
    for step in range(8):
        loss = model(target(dw.rank()).float().view(1, -1)).sum()
        (loss * (step + 1 if zeroes else 1)).backward()
        adam.step()
        if zeroes:
            adam.zero_grad()
    return flat(model)


def test_qadam_adds_to_gradients_of_an_earlier_step_as_adam_does() -> None:
    """The Adam that was given steps itself, and its gradients are gradients after the warm-up too."""
    for zeroed, left_over in run_ranks(lambda: [_left_over(zeroes) for zeroes in (True, False)], 2):
        assert (zeroed - left_over).abs().mean() < 0.06, "errors of the codec are left over too"


def _with_a_scaler_of_its_own() -> None:
    model = dw.wrap_model(Quadratic(torch.float32), comm="qadam(warmup_steps=1)")
    optimizer = dw.wrap_optimizer(torch.optim.Adam(model.parameters()), model)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(target(dw.rank()).float())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_qadam_refuses_a_scaler_that_does_not_say_its_scale() -> None:
    with pytest.raises(ModelError, match=r"take precision='fp16', distwrap\.backward"):
        run_ranks(_with_a_scaler_of_its_own, 2)


# consolidate


class EvaluationError(Exception):
    """Raised inside of `consolidate`."""


class _Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _left_by_an_exception(comm: str, leaves: bool) -> tuple[bool, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = dw.wrap_model(_Net(), comm=comm)
    optimizer = sgd(model.parameters())

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 3, generator=torch.Generator().manual_seed(dw.rank()))).exp().mean().backward()
            optimizer.step()

    train()
    own = copy.deepcopy(model.state_dict())
    with suppress(EvaluationError), dw.consolidate(model):
        if leaves and dw.rank() == 1:
            raise EvaluationError
    back = all(torch.equal(value, own[key]) for key, value in model.state_dict().items())
    train()
    with dw.consolidate(model):
        return back, [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("comm", few(["local_sgd(sync_every=100)", "decentralized", "async(sync_interval_ms=1)"], 1))
def test_a_consolidate_that_an_exception_leaves_gives_the_own_weights_back(comm: str) -> None:
    first, second = run_ranks(_left_by_an_exception, 2, comm, True)
    assert all(map(torch.equal, first[1], second[1]))
    if "async" not in comm:  # whose means come when they come
        plain = run_ranks(_left_by_an_exception, 2, comm, False)
        assert second[0] == plain[1][0] == ("local" in comm)
        assert all(map(torch.equal, first[1], plain[0][1]))


# A rank that does something else


def _loaded_on_one_rank(comm: str, before: int) -> None:
    model = dw.wrap_model(Quadratic(), comm=comm)
    optimizer = sgd(model.parameters())
    descend(model, optimizer.step, before)
    if dw.rank() == 1:
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    descend(model, optimizer.step, 12)


@pytest.mark.parametrize(
    ("comm", "before", "where"),
    [
        ("local_sgd(sync_every=4)", 0, "before step 1"),
        ("async(sync_interval_ms=1)", 0, "before step 1"),
        ("decentralized(warmup_steps=3)", 3, "before step 4"),
        ("diloco(sync_every=2)", 5, "after step 8, part 0,"),
    ],
)
def test_weights_that_are_loaded_on_one_rank_are_noticed(comm: str, before: int, where: str) -> None:
    """Where the algorithm goes on from weights that are alike; elsewhere they are averaged like any others."""
    with pytest.raises(ModelError, match=f"{where} the ranks do not hold the same weights of Quadratic"):
        run_ranks(_loaded_on_one_rank, 2, comm, before)


def _layer_added() -> None:
    model = dw.wrap_model(Quadratic(), comm="local_sgd(sync_every=2)")
    net: Any = dw.unwrap_model(model)
    net.w.append(nn.Parameter(torch.zeros(0, dtype=torch.float64)))
    optimizer = sgd(model.parameters())
    (model(target(0)) + net.w[3].sum()).backward()
    optimizer.step()


def test_a_weight_that_came_later_is_refused() -> None:
    """Since no exchange knows it."""
    with pytest.raises(ModelError, match=r"'w\.3' was added"):
        run_ranks(_layer_added, 2)
