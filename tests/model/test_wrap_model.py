"""What `wrap_model` makes of a model, and that it trains as one process would."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distwrap as dw
from distwrap.errors import ModelError, OptionError
from distwrap.testing import run_ranks
from tests.one_process import assert_as_in_one_process
from tests.plans import TP

STEPS = 4


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches() -> torch.Tensor:
    return torch.randn(STEPS, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True).sin()).pow(2).mean()


def test_is_a_distributed_data_parallel_that_trains_as_one_process() -> None:
    """The gradients are the mean over ranks, so several steps over shares equal those over joint batches, to 1e-12."""

    def train() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        model = dw.wrap_model(network())
        assert isinstance(model, DistributedDataParallel) == (dw.world_size() > 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for x in batches():
            optimizer.zero_grad()
            loss_of(model, x[dw.rank() :: dw.world_size()]).backward()
            optimizer.step()
        return model.state_dict(), [parameter.grad for parameter in model.parameters()]

    [(weights, gradients)] = run_ranks(train, 1)
    for of_rank, gradients_of_rank in run_ranks(train, 2):
        for name, value in weights.items():
            torch.testing.assert_close(of_rank[name], value, rtol=0, atol=1e-12)
        for ours, reference in zip(gradients_of_rank, gradients, strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


def test_all_ranks_start_from_rank_zeros_weights() -> None:
    """Models that were made differently on each rank are alike once wrapped, also those with nothing to train."""

    def on_rank() -> list[list[float]]:
        torch.manual_seed(dw.rank())
        trained, frozen = nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
        for buffer in (trained.running_mean, frozen[1].running_mean):
            buffer.fill_(dw.rank() + 1)
        models = [dw.wrap_model(trained), dw.wrap_model(frozen)]
        assert frozen[1].running_mean.tolist() == [1, 1]
        return [value.flatten().tolist() for model in models for value in model.state_dict().values()]

    one, other = run_ranks(on_rank, 2)
    assert one == other


def test_one_rank_alone_may_evaluate() -> None:
    """Without gradients the bare model runs, so rank 0 evaluates alone, and training goes on in step afterwards."""

    def on_rank() -> tuple[int, float]:
        net = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).double()
        model, evaluations = dw.wrap_model(net, same_inputs=True), 0
        for x in batches():
            loss_of(model, x).backward()
            for context in (torch.no_grad, torch.inference_mode):
                if dw.rank() == 0:
                    with context():
                        model(x)
                        evaluations += 1
        return evaluations, net[0].weight.grad.sum().item()

    (evaluations, one), (none, other) = run_ranks(on_rank, 2, timeout=20)
    assert (evaluations, none) == (2 * STEPS, 0)
    assert one == other


def test_no_sync_accumulates_locally() -> None:
    """Under ``no_sync()`` nothing is exchanged; the next backward outside averages what has accumulated."""

    def on_rank() -> tuple[float, float]:
        layer = nn.Linear(1, 1, bias=False).double()
        model = dw.wrap_model(layer)
        x = torch.full((1, 1), float(dw.rank() + 1), dtype=torch.float64)
        with model.no_sync():
            model(x).sum().backward()
        alone = layer.weight.grad.item()
        model(10 * x).sum().backward()
        return alone, layer.weight.grad.item()

    assert run_ranks(on_rank, 2) == [(1, 16.5), (2, 16.5)]


def test_options_of_ddp_are_passed_on() -> None:
    """``find_unused_parameters=True`` reaches DDP: a step that leaves a branch out neither fails nor hangs."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
            return self.left(x) if left else self.right(x)

    def on_rank() -> list[bool]:
        model = dw.wrap_model(Branches(), find_unused_parameters=True)
        for left in (True, False, dw.rank() == 0):
            model(torch.ones(1, 2), left).sum().backward()
        return [part.weight.grad is not None for part in (model.left, model.right)]

    assert run_ranks(on_rank, 2, timeout=20) == [[True, True]] * 2


def test_a_frozen_model_passes() -> None:
    """A model with nothing to train, as a teacher, is run as it is, by one rank alone if need be."""

    def on_rank() -> bool:
        teacher = nn.Linear(2, 1).requires_grad_(False)
        model = dw.wrap_model(teacher)
        if dw.rank() == 0:
            model(torch.ones(1, 2))
        student = dw.wrap_model(nn.Linear(2, 1))
        (student(torch.ones(1, 2)) - model(torch.ones(1, 2))).sum().backward()
        return dw.unwrap_model(model) is teacher and teacher.weight.grad is None

    assert run_ranks(on_rank, 2) == [True, True]


def test_a_second_wrapping_is_refused() -> None:
    """What is wrapped already, by distwrap or by torch, is not wrapped again."""

    def on_rank() -> list[str]:
        refusals = []
        for model in (
            dw.wrap_model(nn.Linear(1, 1)),
            DistributedDataParallel(nn.Linear(1, 1)),
            nn.DataParallel(nn.Linear(1, 1)),
        ):
            with pytest.raises(ModelError) as refusal:
                dw.wrap_model(model)
            refusals.append(str(refusal.value))
        return refusals

    for refusals in run_ranks(on_rank, 2):
        assert [refusal.split(": ")[0] for refusal in refusals] == [
            "wrap_model() got a Linear that is in a wrapper of wrap_model() already",
            "wrap_model() got a Linear that is in a DistributedDataParallel already",
            "wrap_model() got a Linear that is in a DataParallel already",
        ]


class WithOwnModule(nn.Module):
    """A model with a part that is called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def weights(self) -> torch.Tensor:
        """Reach the part by its name, as a method of the model's own does."""
        return self.module.weight


def module_of_wrapped(strategy: str) -> None:
    """Hold a wrapped model's ``module`` against the user's model."""
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    for net in (parts,) if strategy == "pipeline" else (parts, WithOwnModule()):
        model: Any = dw.wrap_model(net) if dw.world_size() > 1 else dw.wrap_model(net, strategy=strategy)
        assert model.module is dw.unwrap_model(model) is net, strategy
        assert hasattr(model.module, "module") is isinstance(net, WithOwnModule), "a loop that unwraps must end"
        assert [*model.state_dict()] == [*net.state_dict()], strategy


ALIKE = ("ddp", "zero1", "fsdp", TP, "pipeline")


def test_the_users_model_is_module_with_one_rank() -> None:
    """``model.module`` is the user's model in a single process too, also where that has a part of this name."""
    for strategy in (*ALIKE, "dp", "single"):
        module_of_wrapped(strategy)


@pytest.mark.slow("seven strategies on two ranks")
@pytest.mark.parametrize("strategy", ALIKE)
def test_the_users_model_is_module_with_two_ranks(strategy: str) -> None:
    """``model.module`` is the same under each strategy as it is in one process."""
    dw.distributed(strategy=strategy, nprocs=2, timeout=60)(module_of_wrapped)(strategy)


@pytest.mark.parametrize("kind", [WithOwnModule, lambda: nn.Linear(2, 1)])
def test_in_a_single_process_the_wrapper_changes_nothing(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Copies, pickles and compiled models of a wrapper are those of the model, and so are the numbers."""
    net, x = kind(), torch.ones(3, 2)
    model = dw.wrap_model(net)
    assert torch.equal(model(x), net(x))
    assert isinstance(model, type(net))
    assert type(copy.deepcopy(model)) is type(pickle.loads(pickle.dumps(model))) is type(net)
    torch.save(model, tmp_path / "whole.pt")
    assert type(torch.load(tmp_path / "whole.pt", weights_only=False)) is type(net)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), net(x))
    assert torch.equal(torch.jit.script(model)(x), net(x))
    model.load_state_dict({f"module.{key}": torch.zeros_like(value) for key, value in net.state_dict().items()})
    assert not model(x).any()
    with pytest.raises(ModelError, match="in a wrapper"):
        dw.wrap_model(model)


def test_methods_of_a_model_in_a_single_process_are_its_own() -> None:
    """A method finds the parts of the model by their names."""
    net = WithOwnModule()
    model: Any = dw.wrap_model(net)
    assert model.weights() is net.module.weight


@pytest.mark.parametrize(
    ("wrap", "error", "words"),
    [
        (lambda: dw.wrap_model([1]), ModelError, r"takes an nn\.Module, not a list"),
        (lambda: dw.wrap_model(nn.Linear(1, 1), strategy="dpp"), OptionError, "Did you mean 'ddp'"),
        (lambda: dw.wrap_model(nn.Linear(1, 1), precision="fp61"), OptionError, "fp16"),
        (lambda: dw.wrap_optimizer(nn.Linear(1, 1)), OptionError, "takes a torch optimizer, not a Linear"),
    ],
)
def test_wrong_arguments_are_named(wrap, error, words) -> None:  # type: ignore[no-untyped-def]
    """What cannot be wrapped, or is spelt wrongly, is an error that says so."""
    with pytest.raises(error, match=words):
        wrap()


def test_what_cannot_work_on_several_ranks_is_refused() -> None:
    """One-process strategies are refused in a world of two ranks."""

    def on_rank() -> None:
        for options in ({"strategy": "single"}, {"strategy": "dp"}):
            with pytest.raises(ModelError):
                dw.wrap_model(nn.BatchNorm1d(1), **options)

    run_ranks(on_rank, 2)


def test_the_model_outlives_its_group() -> None:
    """After the group is gone a wrapped model still computes, with and without gradients."""

    def on_rank() -> list[float]:
        model = dw.wrap_model(nn.Linear(1, 1, bias=False))
        model(torch.ones(1, 1)).sum().backward()
        dw.teardown_process_group()
        model.weight.grad = None
        for context in (torch.no_grad(), nullcontext()):
            with context:
                y = model(torch.full((1, 1), 3.0)).sum()
        y.backward()
        return model.weight.grad.flatten().tolist()

    assert run_ranks(on_rank, 2) == [[3.0], [3.0]]


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_after_teardown_it_is_the_bare_model(precision: str) -> None:
    """When the process group is gone the wrapped model still runs and trains, in its precision, by itself."""

    def outlive() -> None:
        model = dw.wrap_model(nn.Linear(3, 2), precision=precision)
        x = torch.full((1, 3), 1 / 3)
        with torch.no_grad():
            before = model(x)
        dw.teardown_process_group()
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
        model(x).sum().backward()
        assert model.weight.grad is not None

    run_ranks(outlive, 2)


def test_wrapped_anew_it_trains_as_in_one_process() -> None:
    """A model that is unwrapped and wrapped anew trains by the new wrapper, also while somebody holds the old one."""

    def train() -> list[float]:
        old: Any = dw.wrap_model(network())
        optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
        model: Any = old
        for number, x in enumerate(batches()):
            optimizer.zero_grad()
            loss_of(model, x[dw.rank() :: dw.world_size()]).backward()
            optimizer.step()
            if number % 2 == 0:
                loss_of(model, x)  # whose backward never comes
                model = dw.wrap_model(
                    dw.unwrap_model(model), find_unused_parameters=number == 0 and dw.world_size() > 1
                )
        dw.assert_in_sync(model)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    assert_as_in_one_process(train)


def test_assigning_parameters_is_refused() -> None:
    """load_state_dict(assign=True), which would take the parameters away from DDP, is refused."""

    def assign() -> None:
        model = dw.wrap_model(nn.Sequential(nn.Linear(3, 2)))
        assert len(model) == 1
        assert model
        with pytest.raises(ModelError, match="assign=True"):
            model.load_state_dict(model.state_dict(), assign=True)

    run_ranks(assign, 2)
