"""A function that knows nothing of distribution is made distributed, and the caller's own objects are trained."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.errors import ModelError, OptionError
from tests import retrofitted
from tests.forked_commands import forked_commands
from tests.slow import INTERPRETERS

ROOT = Path(__file__).parent.parent


def plain(calls: int) -> dict[str, Any]:
    """What one process without distwrap makes of it, at the same global batch."""
    model, optimizer, loader, scheduler = retrofitted.objects(retrofitted.GLOBAL_BATCH)
    for _ in range(calls):
        retrofitted.train(model, optimizer, loader, scheduler)
    return retrofitted.state(model, optimizer, scheduler)


def same(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def over_two_ranks(fn: Any, launcher: str = "forkserver") -> Any:
    return dw.distributed(nprocs=2, launcher=launcher, retrofit=True, timeout=30)(fn)


@pytest.mark.parametrize(("launcher", "calls"), [("fork", 2), ("forkserver", 2)])
def test_the_callers_objects_are_trained(launcher: str, calls: int) -> None:
    """After a call over two ranks, and another, model, optimizer and scheduler are where one process would be."""
    result = retrofitted.run(launcher, nprocs=2, calls=calls)
    same(result, plain(calls))
    assert result["optimizer"]["param_groups"][0]["lr"] == 0.05 / 4**calls
    assert result["optimizer"]["state"][0]["step"] == 8 * calls


def test_a_single_process_trains_in_place() -> None:
    """With one process the very same call trains the same objects to the same state."""
    same(retrofitted.run("auto", nprocs=1, calls=2), plain(calls=2))


class Named(list[Any]):
    """A list that is not made from its items alone."""

    def __init__(self, name: str, items: list[Any]) -> None:
        super().__init__(items)
        self.name = name


def test_a_list_of_a_class_of_its_own_may_hold_models() -> None:
    def fit(nets: Named) -> Named:
        nets[0](torch.ones(1, 1)).sum().backward()
        return Named("back", list(nets))

    net = nn.Linear(1, 1)
    back = over_two_ranks(fit, "fork")(Named("there", [net]))
    assert (back.name, back[0]) == ("back", net)


def run_script(launcher: str, path: Path, *outer: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, *(outer or ("-W", "error")), "-m", "tests.retrofitted", launcher, str(path)]
    return subprocess.Popen(command, env={**os.environ, **env}, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow(INTERPRETERS)
def test_in_a_script_that_is_run_again(tmp_path: Path) -> None:
    """Under the script launcher rank 0 is the caller, and its objects are trained, in two calls, without a warning."""
    process = run_script("script", tmp_path / "state.pt")
    assert process.communicate(timeout=90)[1] == ""
    same(torch.load(tmp_path / "state.pt"), plain(calls=2))


@pytest.mark.slow(INTERPRETERS)
def test_under_an_outer_launcher(tmp_path: Path) -> None:
    """In processes that torchrun started, each call joins, and the objects are trained in place, without a warning."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = run_script("external", tmp_path / "state.pt", *torchrun, OMP_NUM_THREADS="1", **forked_commands())
    errors = process.communicate(timeout=90)[1]
    assert process.returncode == 0, errors
    assert "Warning" not in errors
    same(torch.load(tmp_path / "state.pt"), plain(calls=2))


def test_arguments_in_containers_and_the_return_value() -> None:
    """Models in lists and dicts are wrapped and trained, and what is returned of them is the caller's own object."""

    def fit(nets: dict[str, Any], optimizers: tuple[Any, ...]) -> tuple[Any, ...]:
        assert all(isinstance(net, nn.parallel.DistributedDataParallel) for net in (nets["a"], nets["rest"][0]))
        for net, optimizer in zip((nets["a"], nets["rest"][0]), optimizers, strict=True):
            net(torch.full((1, 1), dw.rank() + 1.0)).sum().backward()
            optimizer.step()
        return nets["rest"][0], {"a": nets["a"], "optimizer": optimizers[1]}, 5

    one, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    before = one.weight.item(), other.weight.item()
    optimizers = tuple(torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, other))
    for launcher in ("forkserver", "fork"):
        returned = over_two_ranks(fit, launcher)({"a": one, "rest": [other]}, optimizers=optimizers)
        assert returned[0] is other
        assert returned[1]["a"] is one
        assert returned[1]["optimizer"] is optimizers[1]
        assert returned[2] == 5
    moved = [was - net.weight.item() for was, net in zip(before, (one, other), strict=True)]
    assert moved == pytest.approx([2 * 0.15] * 2)
    everyones = over_two_ranks(fit).options(returns="all")({"a": one, "rest": [other]}, optimizers)
    assert [value[0] is other for value in everyones] == [True, True]


class Parts:
    """A container of one's own, without a ``__dict__``."""

    __slots__ = ("loader", "model")

    def __init__(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        self.model, self.loader = model, loader


class Trainer:
    """Holds all that it trains, some of it deep inside."""

    def __init__(self, batch_size: int) -> None:
        model, self.optimizer, loader, scheduler = retrofitted.objects(batch_size)
        self.parts = [Parts(model, loader)]
        self.more = {"scheduler": scheduler, "trainer": self}

    def fit(self) -> str:
        parts = self.parts[0]
        retrofitted.train(parts.model, self.optimizer, parts.loader, self.more["scheduler"])  # type: ignore[arg-type]
        if self.optimizer.param_groups[0]["lr"] < 0.002:
            raise ArithmeticError(type(parts.model).__name__)
        return type(parts.model).__name__

    def state(self) -> dict[str, Any]:
        """Return what training has changed."""
        return retrofitted.state(self.parts[0].model, self.optimizer, self.more["scheduler"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("launcher", "nprocs"), [("fork", 2), ("forkserver", 2), ("auto", 1)])
def test_what_an_object_holds_is_trained(launcher: str, nprocs: int) -> None:
    """Models, optimizers and loaders in attributes, at any depth, are found, and hold the caller's own afterwards."""
    trainer = Trainer(retrofitted.GLOBAL_BATCH // nprocs)
    model, loader = trainer.parts[0].model, trainer.parts[0].loader
    fit = dw.distributed(nprocs=nprocs, launcher=launcher, retrofit=True, timeout=30)
    assert fit(trainer.fit)() == ("DistributedModel" if nprocs > 1 else "LocalModel")
    same(trainer.state(), plain(calls=1))
    fit(Trainer.fit)(trainer)
    same(trainer.state(), plain(calls=2))
    with pytest.raises(ArithmeticError):
        fit(trainer.fit)()
    assert trainer.parts[0].model is model
    assert trainer.parts[0].loader is loader
    assert isinstance(model, nn.Sequential)


class Net(nn.Linear):
    """A model that trains itself."""

    @dw.distributed(nprocs=2, launcher="forkserver", retrofit=True)
    def fit(self, lr: float) -> Net:
        optimizer = torch.optim.SGD(self.parameters(), lr=lr)
        self(torch.full((1, 1), dw.rank() + 1.0)).sum().backward()
        optimizer.step()
        return self


def test_a_method_of_a_model_trains_it() -> None:
    """Where the function is the model's own method, the model is wrapped, however the method is called."""
    net = Net(1, 1, bias=False)
    before = net.weight.item()
    assert net.fit(0.1) is net
    assert before - net.weight.item() == pytest.approx(0.15)
    assert Net.fit(net, 0.1) is net
    assert before - net.weight.item() == pytest.approx(0.3)


def test_a_model_that_cannot_be_replaced_is_refused() -> None:
    with pytest.raises(OptionError, match="train alone"):
        over_two_ranks(print)({nn.Linear(1, 1)}, DataLoader(range(6)))  # type: ignore[arg-type]


class Master(dw.Strategy):
    """A strategy that trains a copy of the model, by an optimizer of its own, and says what they hold."""

    shards = True

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        self.master = copy.deepcopy(model)
        return self.master

    def prepare_optimizer(self, optimizer: Any, model: nn.Module | None) -> Any:
        return torch.optim.SGD(self.master.parameters(), lr=optimizer.defaults["lr"], momentum=0.5)

    def state(self, thing: Any, *, everywhere: bool = False) -> dict[str, Any]:
        assert dw.gather_object(everywhere) == [True] * dw.world_size()  # a collective
        return super().state(thing, everywhere=everywhere)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_what_a_strategy_has_trained_comes_home(nprocs: int) -> None:
    """Where the strategy trains other tensors than the caller's, its state is what comes home, also the optimizer's."""

    def fit(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    before = model.weight.item()
    over_two_ranks(fit).options(nprocs=nprocs, strategy=Master())(model, optimizer)
    assert before - model.weight.item() == pytest.approx(0.1)
    assert optimizer.state[model.weight]["momentum_buffer"].item() == 1.0


def test_a_frozen_teacher_passes_and_stays_as_it_is() -> None:
    """A model with nothing to train, and a loss that is a module, are arguments like any other."""

    def distill(student: nn.Module, teacher: nn.Module, loss_of: nn.Module, optimizer: Any) -> None:
        x = torch.ones(2, 2)
        loss_of(student(x), teacher(x)).backward()
        optimizer.step()

    student, teacher = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
    before = student.weight.clone(), teacher.weight.clone()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    over_two_ranks(distill)(student, teacher, nn.MSELoss(), optimizer)
    assert not torch.equal(student.weight, before[0])
    assert torch.equal(teacher.weight, before[1])


def test_buffers_and_training_flags_come_home() -> None:
    """Running statistics, and which parts were left in training mode, are those of rank 0."""

    def fit(model: nn.Module) -> None:
        for _ in range(3):
            model(torch.full((2, 1), dw.rank() + 1.0))
        model.eval()
        model[1].train()

    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout())
    over_two_ranks(fit)(model)
    assert model[0].num_batches_tracked == 3
    assert model[0].running_mean.item() == pytest.approx(1 - 0.9**3)
    assert [model.training, model[0].training, model[1].training] == [False, False, True]


def test_loaders_are_shared_out() -> None:
    """A loader among the arguments yields this rank's share, each sample on one rank; the caller's stays whole."""

    def collect(loaders: list[Any]) -> list[int]:
        return [int(x) for batch in loaders[0] for x in batch]

    loader = DataLoader(range(6), batch_size=2)  # type: ignore[arg-type]
    one, other = over_two_ranks(collect).options(returns="all")([loader])
    assert (one, other) == ([0, 2, 4], [1, 3, 5])
    assert len(loader) == 3


def test_a_changed_structure_is_refused() -> None:
    """Where the function gives the model other layers, that is an error, and the caller's weights are as before."""

    def grow(model: nn.Module) -> None:
        nn.init.constant_(model[0].weight, 7)
        dw.unwrap_model(model).append(nn.Linear(1, 1))

    def widen(model: nn.Module) -> None:
        dw.unwrap_model(model)[0] = nn.Linear(1, 2)

    for change in (grow, widen):
        model = nn.Sequential(nn.Linear(1, 1))
        before = model[0].weight.item()
        with pytest.raises(ModelError, match="changed the structure"):
            over_two_ranks(change)(model)
        assert model[0].weight.item() == before


def test_shared_parameters_are_refused() -> None:
    """Two arguments that share parameters would exchange gradients twice, and are refused."""
    body = nn.Linear(1, 1)
    with pytest.raises(ModelError, match="share parameters"):
        over_two_ranks(print)(body, nn.Sequential(body))


def test_the_same_object_twice_is_one() -> None:
    """A model that stands among the arguments twice is wrapped once, and is one object for the function too."""

    def fit(model: nn.Module, models: list[nn.Module]) -> bool:
        return model is models[0]

    model = nn.Linear(1, 1)
    assert over_two_ranks(fit)(model, [model]) is True


def test_an_exception_leaves_the_callers_objects_alone() -> None:
    """Where a rank fails, nothing of its training is written back."""

    def fit(model: nn.Module) -> None:
        with torch.no_grad():
            model.weight.fill_(7)
        raise ArithmeticError("diverged")

    model = nn.Linear(1, 1)
    before = model.weight.item()
    with pytest.raises(ArithmeticError, match="diverged"):
        over_two_ranks(fit)(model)
    assert model.weight.item() == before


def test_shuffles_go_on_from_call_to_call() -> None:
    """A second call with the same loader shuffles anew, as the next epochs of one call would."""

    def orders(loader: DataLoader[Any], epochs: int) -> list[list[int]]:
        return [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(epochs)]

    def loader() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(20)), batch_size=5, shuffle=True)

    run = over_two_ranks(orders)
    mine = loader()
    assert run(mine, 1) + run(mine, 2) == run(loader(), 3)


def test_a_model_that_is_not_found_is_no_silence() -> None:
    """One out of a closure would be trained apart, on each rank's share of a loader that was found."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(loader: DataLoader[Any]) -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with pytest.raises(ModelError, match="has not wrapped"):
        over_two_ranks(fit, "fork")(DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=2))


def test_what_the_function_freezes_is_frozen_in_the_caller() -> None:
    """As its training flags, the model's parameters come home as the function has left them."""

    def freeze(model: nn.Module) -> None:
        model[0].requires_grad_(False)
        model[1].requires_grad_(True)

    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    over_two_ranks(freeze)(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


LEFT: list[torch.optim.Optimizer] = []


def in_phases(model: nn.Module) -> None:
    """Train with an optimizer for each phase, of which rank 1 still has the first one at the end."""
    for _ in range(2):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            model(torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if dw.rank() == 1 and not LEFT:
            LEFT.append(optimizer)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
@pytest.mark.slow("others of its kind are in make test")
def test_an_optimizer_that_is_gone_on_one_rank_alone(strategy: str) -> None:
    """A divided model becomes whole again, with the optimizers that all ranks still have."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()

    model, expected = net(), net()
    dw.distributed(strategy=strategy, nprocs=2, retrofit=True, timeout=20)(in_phases)(model)
    in_phases(expected)
    same(model.state_dict(), expected.state_dict())
