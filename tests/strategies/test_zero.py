"""Optimizers that are divided over ranks train, and are saved, as those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import distwrap as dw
from distwrap._internals.torch import version_of
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.model.wrapped_models import bound_strategy
from distwrap.registry import strategies
from distwrap.strategies.zero import OptimizerShares, ZeroStrategy
from distwrap.testing import run_ranks
from tests.slow import nightly

ROWS, BATCHES = 12, 4


def net(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(4)
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))
    return nn.Sequential(*layers).to(dtype)


def batches(dtype: torch.dtype = torch.float64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's share of each batch."""
    generator = torch.Generator().manual_seed(5)
    for x in torch.randn(BATCHES, ROWS, 6, dtype=torch.float64, generator=generator).to(dtype):
        mine = x[dw.rank() :: dw.world_size()]
        yield mine, mine.sum(1, keepdim=True).sin()


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return [{"params": biases, "weight_decay": 0.0}, {"params": weights, "lr": 0.02}]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
    "groups": lambda model: torch.optim.AdamW(groups(model), lr=0.01, weight_decay=0.1),
}


def epoch(model: Any, optimizer: torch.optim.Optimizer, how: str = "plain") -> list[float]:
    """Train over all batches in one of several ways, and return the norms that the clip has found."""
    norms = []
    for (x, y), window in dw.accumulate(list(batches()), 2 if how in ("accumulate", "scale_loss") else 1, model):
        losses = (model(x) - y).square()
        if how == "scale_loss":
            counted = losses[x.sum(1) > 0]  # another number on each rank
            loss = dw.scale_loss(counted.sum(), counted.numel())
        else:
            loss = losses.mean() / window.size
        dw.backward(loss)
        if how == "clip":
            found = (bound_strategy(optimizer) or ZeroStrategy()).clip(optimizer, model.parameters(), 0.3)
            norms.append(float(found or 0))
        if window.last:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(strategy: str, kind: str, how: str, *, first: bool = False) -> tuple[torch.Tensor, list[float], int]:
    """Return the weights after three epochs, the norms, and the bytes of this rank's state."""
    plain = net()
    early = OPTIMIZERS[kind](plain) if first else None
    model = dw.wrap_model(plain, strategy=strategy)
    optimizer = dw.wrap_optimizer(early) if early is not None else OPTIMIZERS[kind](model)
    norms = [norm for _ in range(3) for norm in epoch(model, optimizer, how)]
    dw.assert_in_sync(model)
    return weights(plain), norms, bytes_of(optimizer)


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(map(bytes_of_parameter, optimizer.state.values()))


def bytes_of_parameter(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def case(*names: str) -> Callable[[str], str]:
    return lambda text: f"{' '.join(names)}: {text}"


def everything(strategy: str) -> dict[tuple[str, str], Any]:
    found = {(kind, "plain"): trained(strategy, kind, "plain", first=True) for kind in OPTIMIZERS}
    return found | {("groups", "clip"): trained(strategy, "groups", "clip")}


@pytest.mark.parametrize("nprocs", [2, nightly(3, row="products", why="two ranks show it")])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_it_trains_as_one_process_and_each_rank_has_its_share(nprocs: int) -> None:
    """Each optimizer's state is on one rank or another, of which each has its share; the weights are one process's."""
    ranks = run_ranks(everything, nprocs, "zero1", timeout=60)
    for (kind, how), (expected, norms, size) in everything("ddp").items():
        for found in ranks:
            own, own_norms, _ = found[kind, how]
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-9, msg=case(kind, how))
            assert own_norms == pytest.approx(norms, abs=1e-9)
        shares = [found[kind, how][2] for found in ranks]
        assert sum(shares) == size, (kind, how)
        assert max(shares) <= 1.5 * size / nprocs, (kind, how)


# Checkpoints


def begun(strategy: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    model = dw.wrap_model(net(), strategy=strategy)
    optimizer = dw.wrap_optimizer(OPTIMIZERS["groups"](model))
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def save_under(strategies: list[str], folder: Path) -> None:
    for strategy in strategies:
        model, optimizer, scheduler = begun(strategy)
        epoch(model, optimizer)
        scheduler.step()
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        name = f"{strategy}-{dw.world_size()}"
        dw.save(state, folder / f"{name}.pt", background=True)
        dw.save(state, folder / f"{name}-parts", io="sharded")
    dw.wait_for_saves()


def go_on(strategies: list[str], folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Load each checkpoint under each strategy, save it again, and train one more epoch."""
    found = {}
    for path in sorted(folder.iterdir()):
        for strategy in strategies:
            model, optimizer, scheduler = begun(strategy)
            dw.load(path, into={"model": model, "optimizer": optimizer, "scheduler": scheduler})
            saved = dw.load(path)
            again = folder.parent / f"{dw.world_size()}.pt"
            dw.save({"model": model, "optimizer": optimizer}, again)
            whole = sum(map(bytes_of_parameter, saved["optimizer"]["state"].values()))
            assert bytes_of(optimizer) < 0.7 * whole or dw.world_size() == 1
            if dw.rank() == 0:
                torch.testing.assert_close(dw.load(again)["optimizer"], saved["optimizer"], rtol=0, atol=0)
            epoch(model, optimizer)
            found[path.name, strategy] = weights(model)
    return found


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_checkpoint_goes_from_each_strategy_to_each_at_any_number_of_ranks(tmp_path: Path) -> None:
    """What 3 ranks have saved, in one file or in parts, 2 ranks and one process load bit by bit, and the other way."""
    folder, strategies = tmp_path / "saved", ["ddp", "zero1"]
    folder.mkdir()
    run_ranks(save_under, 3, strategies, folder)
    save_under(["ddp"], folder)
    names = {f"{name}{kind}" for name in ("ddp-1", "ddp-3", "zero1-3") for kind in (".pt", "-parts")}
    assert {path.name for path in folder.iterdir()} == names
    model, optimizer, scheduler = begun("single")
    for _ in range(2):
        epoch(model, optimizer)
        scheduler.step()
    expected = weights(model)
    for found in (*run_ranks(go_on, 2, strategies[1:], folder, timeout=60), go_on(["ddp"], folder)):
        assert {name for name, _ in found} == names
        for name, own in found.items():
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-12, msg=case(*name))
    whole, divided = (dw.load(folder / f"{name}-3.pt")["optimizer"] for name in ("ddp", "zero1"))
    torch.testing.assert_close(divided, whole, rtol=0, atol=0)


# Gradients


def gradients(strategy: str) -> dict[str, Any]:
    """Return the weights after steps over gradients that come in special ways."""
    found: dict[str, Any] = {}
    model = dw.wrap_model(net(), strategy=strategy)
    for x, y in batches():
        (model(x) - y).square().mean().backward()
    optimizer = dw.wrap_optimizer(OPTIMIZERS["sgd"](model))
    versions = [version_of(parameter) for parameter in model.parameters()]
    optimizer.step()
    found["summed"] = weights(model)
    if strategy != "ddp":
        changes = [version_of(each) - then for each, then in zip(model.parameters(), versions, strict=True)]
        assert changes == [1] * 6  # whatever was stepped here
    for word in ("", "find_unused_parameters", "static_graph"):
        options = {word: True} if word else {}
        model = dw.wrap_model(Branches(), strategy=strategy, **options)
        optimizer = OPTIMIZERS["adamw"](model)
        for number, (x, _) in enumerate(batches()):
            if not word:
                model.both = True
            elif word == "find_unused_parameters":
                model.left = (number + dw.rank()) % 2 == 0
            for _ in range(2):  # two averaged backwards a step
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[word] = weights(model)
    return found


class Branches(nn.Module):
    """A model of which a forward takes one branch, or both; a third one is never taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.one, self.other, self.never = (nn.Linear(6, 1, dtype=torch.float64) for _ in range(3))
        self.left, self.both = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.both:
            return self.one(x) + self.other(x) + self.never(x)  # type: ignore[no-any-return]
        return self.one(x) if self.left else self.other(x).tanh()  # type: ignore[no-any-return]


def scaled_by_hand(strategy: str) -> tuple[torch.Tensor, float, float]:
    """Train with torch's own scaler, with an overflow on one rank alone."""
    model = dw.wrap_model(net(torch.float32), strategy=strategy)
    optimizer = dw.wrap_optimizer(OPTIMIZERS["sgd"](model))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number, (x, y) in enumerate(batches(torch.float32)):
        loss = (model(x) - y).square().mean()
        if number == 1 and dw.rank() == dw.world_size() - 1:
            loss = loss + model[4].bias.sum() * torch.inf  # whose gradient is on one rank
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(model), scaler.get_scale(), 0.0


def special() -> dict[str, Any]:
    found: dict[str, Any] = {name: gradients(name) for name in ("ddp", "zero1")}
    found["scaler"] = {name: scaled_by_hand(name) for name in ("ddp", "zero1")}
    return found


@pytest.mark.slow("others of its kind are in `make test`")
def test_gradients_are_those_of_ddp() -> None:
    """Several backwards before a step, unused branches, and torch's own scaler give what DDP gives on as many ranks."""
    ranks = run_ranks(special, 2, timeout=60)
    for found in ranks:
        for which, expected in found["ddp"].items():
            torch.testing.assert_close(found["zero1"][which], expected, rtol=0, atol=1e-12, msg=case(which))
        torch.testing.assert_close(found["scaler"]["zero1"], found["scaler"]["ddp"], rtol=0, atol=1e-6)
        assert found["scaler"]["ddp"][1] == 32.0


# What is refused


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("zero1(static_grap=True)", "Did you mean 'static_graph'"), ("zero1(process_group=1)", "divides over all ranks")],
)
def test_options_that_do_not_go_with_it_are_refused_where_they_are_named(strategy: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dw.distributed(strategy=strategy)


@pytest.mark.parametrize("comm", ["local_sgd", "qadam"])
def test_algorithms_that_need_everything_on_each_rank_are_refused(comm: str) -> None:
    """They are refused before any process starts."""

    @dw.distributed(nprocs=2, strategy="zero1", comm=comm)
    def never() -> None:
        raise AssertionError

    said = "zero1' does not go with comm=.*Use strategy='ddp' with it"
    with pytest.raises(OptionError, match=said):
        strategies.make(f"zero1(comm={comm!r})")
    with pytest.raises(OptionError, match=said):
        never()


def refused() -> None:
    model = dw.wrap_model(net(), strategy="zero1")
    x, y = next(batches())

    def loss() -> torch.Tensor:
        model.zero_grad()
        found: torch.Tensor = (model(x) - y).square().mean()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    with pytest.raises(ModelError, match="all parameters at once"):
        dw.wrap_optimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ModelError, match="Join does not go"), Join([model]):
        pass
    optimizer = OPTIMIZERS["sgd"](model)
    before = optimizer.state_dict()
    at_first = loss().item()
    assert optimizer.step(loss).item() == at_first  # type: ignore[arg-type,attr-defined]
    assert not before["state"]
    with pytest.raises(ModelError, match="would return a part"):
        optimizer.state_dict()

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                closure()
                return closure()

    with pytest.raises(ModelError, match=r"Twice.step\(closure\) calls"):
        dw.wrap_optimizer(Twice(model.parameters(), lr=0.1), scope="element").step(loss)
    mixed = list(model.parameters())[:: 1 if dw.rank() else -1]
    loss()
    with pytest.raises(ModelError, match="another order"):
        torch.optim.SGD(mixed, lr=0.1).step()


def test_what_would_train_or_save_a_part_is_refused() -> None:
    """A state, a norm or a closure that would be of one rank's share is an error that says what to do."""
    run_ranks(refused, 2)


def over(folder: Path) -> None:
    model = dw.wrap_model(net(), strategy="zero1")
    optimizer = OPTIMIZERS["adamw"](model)
    epoch(model, optimizer)
    dw.save({"optimizer": optimizer}, folder / "optimizer.pt")
    current_world().part(OptimizerShares).close()  # as at the end of the run
    with pytest.raises(ModelError, match="run that has ended"):
        optimizer.step()
    with pytest.raises(ModelError, match="load that"):
        optimizer.state_dict()
    whole = dw.load(folder / "optimizer.pt")["optimizer"]
    optimizer.load_state_dict(whole)
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == len(whole["state"]) == 6


def test_an_optimizer_is_no_part_when_the_run_is_over(tmp_path: Path) -> None:
    """After the run it neither steps nor saves with a part of its state, until it has loaded all of it."""
    run_ranks(over, 2, tmp_path)


class Adaptive(torch.optim.SGD):
    """An optimizer that computes a number from all parameters, as D-Adaptation does."""

    def step(self, closure: Any = None) -> Any:
        found = (each.grad.norm() for each in self.param_groups[0]["params"] if each.grad is not None)
        self.param_groups[0]["d"] = float(sum(found))
        return super().step(closure)


def adapted() -> None:
    model = dw.wrap_model(net(), strategy="zero1")
    optimizer = dw.wrap_optimizer(Adaptive(model.parameters(), lr=0.1), scope="element")
    epoch(model, optimizer)
    dw.assert_in_sync(model)


def test_an_optimizer_that_looks_at_all_parameters_is_found_out() -> None:
    """A number that a step computes from all parameters differs by rank, and is named, whatever was said."""
    with pytest.raises(ModelError, match="'d' of Adaptive"):
        run_ranks(adapted, 2)


# Names


def test_a_line_says_what_another_packages_name_became(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The start of a run under another package's name says which strategy it is here."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")

    @dw.distributed(nprocs=2, strategy="ddp_sharded")
    def main() -> str:
        return repr(current_world().strategy)

    assert main() == "ZeroStrategy()"
    assert capfd.readouterr().err.count("strategy='ddp_sharded' is here ZeroStrategy(") == 1
