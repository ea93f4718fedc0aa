"""Loops under DeepSpeed: equal to one process, with its own checkpoints, and quiet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import CheckpointError, ModelError
from distwrap.options import Options
from distwrap.strategies.deepspeed import DeepSpeedStrategy
from distwrap.testing.ranks import launch_ranks
from tests.strategies.blocks import Language, RMSNorm, texts

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
ROWS = 12


class Net(nn.Module):
    """A few layers, one of them frozen, and one parameter that no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        found: torch.Tensor = self.last(self.frozen(torch.tanh(self.first(x * self.scale))))
        return found

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error."""
        return nn.functional.mse_loss(self(x), y)


def net() -> Net:
    """Make the net whose weights are a seed's."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch of each step."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def share() -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows."""
    x, y = data()
    return x[dw.rank() :: dw.world_size()], y[dw.rank() :: dw.world_size()]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over what is trained."""
    return dw.wrap_optimizer(torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05))


def one_process(steps: int = 4) -> dict[str, torch.Tensor]:
    """Return the weights of one process in plain torch."""
    model = net()
    optimizer = adamw(model)
    for _ in range(steps):
        optimizer.zero_grad()
        dw.backward(model.loss(*data()))
        optimizer.step()
    return model.state_dict()


def launch(strategy: DeepSpeedStrategy, fn: Any, *args: Any, nprocs: int = 2, **options: Any) -> list[Any]:
    """Run a function on ranks under a strategy, and return all ranks' values."""
    chosen = Options().updated({"strategy": strategy, "returns": "all", "timeout": 60, **options})
    return launch_ranks(nprocs, chosen, 120, fn, *args)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare weights of float32."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    """Train as a plain loop does."""
    for _ in range(steps):
        optimizer.zero_grad()
        dw.backward(model.loss(*share()))
        optimizer.step()


def plain_loop() -> tuple[dict[str, torch.Tensor], str]:
    """Train by the user's own backward and step; return the weights, and what the model is."""
    model = dw.wrap_model(net())
    trained(model, adamw(model))
    return model.state_dict(), type(dw.strategies.deepspeed.engine_of(model)).__module__


@pytest.mark.parametrize("nprocs", [2, 3])
@STAGES
def test_a_plain_loop_ends_with_the_weights_of_one_process(stage: int, nprocs: int) -> None:
    """On DeepSpeed's real engine, in float32 to 1e-5."""
    for weights, module in launch(DeepSpeedStrategy(stage=stage), plain_loop, nprocs=nprocs):
        assert_close(weights, one_process())
        assert module == "deepspeed.runtime.engine"


def written_in_its_own_form(folder: Path) -> None:
    """Train, save, train on, load, and train on again: both ways to the end are one."""
    from distwrap.strategies import deepspeed

    model = dw.wrap_model(net())
    optimizer = adamw(model)
    trained(model, optimizer, 2)
    deepspeed.save_engine(model, folder)
    dw.save({"model": model, "optimizer": optimizer}, folder / "plain.pt")
    trained(model, optimizer, 2)
    expected = model.state_dict()
    optimizer.param_groups[0]["lr"] = 1.0
    deepspeed.load_engine(model, folder)
    assert optimizer.param_groups[0]["lr"] == 0.05
    trained(model, optimizer, 2)
    assert_close(model.state_dict(), expected)
    assert_close(expected, one_process())
    with pytest.raises(CheckpointError, match="no checkpoint of DeepSpeed named 'other' in"):
        deepspeed.load_engine(model, folder, "other")


@STAGES
def test_checkpoints_in_its_own_form(stage: int, tmp_path: Path) -> None:
    """``zero_to_fp32`` reads them, and they go on; ours beside them is the plain one."""
    launch(DeepSpeedStrategy(stage=stage), written_in_its_own_form, tmp_path)
    script = [sys.executable, str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "out")]
    subprocess.run(script, check=True, capture_output=True, timeout=120)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    expected = one_process(2)
    if stage == 1:  # in which DeepSpeed leaves frozen weights out for its script
        expected = {name: value for name, value in expected.items() if "frozen" not in name}
    assert_close(found, expected)
    ours = dw.load(tmp_path / "plain.pt")
    assert_close(ours["model"], one_process(2))
    model = net()
    optimizer = adamw(model)
    model.load_state_dict(ours["model"])
    optimizer.load_state_dict(ours["optimizer"])
    for _ in range(2):
        optimizer.zero_grad()
        dw.backward(model.loss(*data()))
        optimizer.step()
    assert_close(model.state_dict(), one_process())


def half_way(path: Path) -> None:
    """Train half of the steps, and save."""
    model = dw.wrap_model(net())
    optimizer = adamw(model)
    trained(model, optimizer, 2)
    dw.save({"model": model, "optimizer": optimizer}, path)


def second_half(path: Path) -> dict[str, torch.Tensor]:
    """Load, and train the other half."""
    model = dw.wrap_model(net())
    optimizer = adamw(model)
    dw.load(path, into={"model": model, "optimizer": optimizer})
    trained(model, optimizer, 2)
    dw.save({"model": model}, path.with_name("end.pt"))
    return dw.load(path.with_name("end.pt"))["model"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("first", "then"), [("zero1", 3), (1, "fsdp"), (2, "ddp"), (3, "zero1"), (3, 1), (2, 3)])
def test_checkpoints_go_from_any_strategy_to_any(first: Any, then: Any, tmp_path: Path) -> None:
    """Saved under one, and gone on with under the other, on another number of ranks."""
    kinds = [DeepSpeedStrategy(stage=each) if isinstance(each, int) else each for each in (first, then)]
    launch(kinds[0], half_way, tmp_path / "half.pt", nprocs=2)
    for weights in launch(kinds[1], second_half, tmp_path / "half.pt", nprocs=3):
        assert_close(weights, one_process())


def by_hand() -> dict[str, torch.Tensor]:
    """Halve the weights within a step's time, by hand on all ranks."""
    from distwrap.strategies.deepspeed import gathered_weights

    model = dw.wrap_model(net())
    optimizer = adamw(model)
    trained(model, optimizer, 1)
    with gathered_weights(model) as own, torch.no_grad():
        assert own.first.weight.shape == (7, 5)
        for parameter in own.parameters():
            parameter.mul_(0.5)
    trained(model, optimizer, 1)
    return model.state_dict()


@STAGES
def test_weights_can_be_changed_by_hand(stage: int) -> None:
    """Within `gathered_weights`, also where each rank has a share of them alone."""
    model = net()
    optimizer = adamw(model)
    dw.backward(model.loss(*data()))
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    optimizer.zero_grad()
    dw.backward(model.loss(*data()))
    optimizer.step()
    for weights in launch(DeepSpeedStrategy(stage=stage), by_hand):
        assert_close(weights, model.state_dict())


def clamped() -> dict[str, torch.Tensor]:
    """Clamp weights through ``.data``, as Wasserstein GANs do, which leaves no trace in their versions."""
    model = dw.wrap_model(net())
    optimizer = adamw(model)
    for _ in range(3):
        trained(model, optimizer, 1)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    return model.state_dict()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_clamp_of_data_acts(stage: int) -> None:
    """The engine's own copy takes it over."""
    model = net()
    optimizer = adamw(model)
    for _ in range(3):
        optimizer.zero_grad()
        dw.backward(model.loss(*data()))
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    for weights in launch(DeepSpeedStrategy(stage=stage), clamped):
        assert_close(weights, model.state_dict())


def discarded(set_to_none: bool, of_model: bool) -> dict[str, torch.Tensor]:
    """Throw the gradients of every second batch away."""
    model = dw.wrap_model(net())
    optimizer = adamw(model)
    for step in range(4):
        dw.backward(model.loss(*share()))
        if step % 2:
            optimizer.step()
        (model if of_model else optimizer).zero_grad(set_to_none=set_to_none)
    return model.state_dict()


@pytest.mark.parametrize(("set_to_none", "of_model"), [(True, False), (True, True), (False, False), (False, True)])
@STAGES
def test_gradients_are_thrown_away(stage: int, set_to_none: bool, of_model: bool) -> None:
    """By ``zero_grad()`` of the model or the optimizer, to none or to zero: what the engine has of them too."""
    model = net()
    optimizer = adamw(model)
    for step in range(4):
        dw.backward(model.loss(*data()))
        if step % 2:
            optimizer.step()
        optimizer.zero_grad()
    for weights in launch(DeepSpeedStrategy(stage=stage), discarded, set_to_none, of_model):
        assert_close(weights, model.state_dict())


def of_config(path: str) -> tuple[float, int]:
    """Train one step with a norm, and return the learning rate's sum and the bucket's size of the engine."""
    from distwrap.strategies.deepspeed import engine_of

    model = dw.wrap_model(net())
    optimizer = adamw(model)
    dw.backward(model.loss(*share()))
    dw.optimizer_step(optimizer, max_norm=0.01)
    engine = engine_of(model)
    return float(engine.get_global_grad_norm()), engine.zero_reduce_bucket_size()


def test_a_config_of_the_users_holds(tmp_path: Path) -> None:
    """A file goes to DeepSpeed as it is; the engine tells the norm before a clip."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 4321}}))
    model = net()
    dw.backward(model.loss(*data()))
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    for norm, size in launch(DeepSpeedStrategy(config=path), of_config, str(path)):
        assert (norm, size) == (pytest.approx(expected, rel=1e-5), 4321)


class ByRows(torch.optim.SGD):
    """Optimizer that scales each weight's step by the norm of the whole weight, as LARS."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1 * float(parameter.norm()))


class Partly(nn.Module):
    """Net with a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.used(x)  # type: ignore[no-any-return]


def refused(how: str) -> None:
    """Do what an engine cannot do, or would do otherwise than one process."""
    x, y = share()
    if how == "unused":
        partly = dw.wrap_model(Partly())
        optimizer = adamw(partly)
        dw.backward(partly(x).sum())
        dw.optimizer_step(optimizer)
    model: Any = dw.wrap_model(net().double() if how == "float64" else net())
    parameters = list(model.parameters())
    if how == "others":
        dw.wrap_optimizer(torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1))
    elif how == "shaped":
        dw.wrap_optimizer(ByRows(parameters, lr=0.1))
    elif how == "alone":
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(parameters, lr=0.1).step()
    elif how == "two models":
        other: Any = dw.wrap_model(net())
        assert adamw(model) is not adamw(other)
        dw.backward(model.loss(x, y) + other.loss(x, y))
    if how == "without an engine":
        dw.backward(model.loss(x, y))
    optimizer = adamw(model)
    if how == "two":
        dw.wrap_optimizer(torch.optim.SGD(model.first.parameters(), lr=0.1))
    if how == "plain":
        model.loss(x, y).backward()
    if how == "plain, of a part":
        model.module.first(x).sum().backward()
    if how == "failed":
        x.requires_grad_().register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dw.backward(model.loss(x, y))
        optimizer.zero_grad()
    dw.backward(model.loss(x, y))
    if how == "own clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif how == "unfrozen":
        dw.unwrap_model(model).frozen.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.module.frozen.parameters())})
    elif how == "own object":
        optimizer.engine.user.step()  # type: ignore[attr-defined]
    elif how == "divided":
        optimizer.step()
        sum(parameter.square().sum() for parameter in model.parameters())
    elif how == "twice":
        optimizer.step()
    elif how == "closure":
        optimizer.step(lambda: 0.0)
    optimizer.step()
    dw.backward(model.loss(x, y))
    raise AssertionError(how)


REFUSED = [
    ("without an engine", "Net has no engine, which computes gradients under strategy='deepspeed'"),
    ("alone", "this step of SGD would not reach DeepSpeed's engine. Call optimizer = wrap_optimizer"),
    ("own object", "this step of AdamW would not reach DeepSpeed's engine. .* step what it returns"),
    ("plain", "loss.backward\\(\\) of Net under strategy='deepspeed'.* Call distwrap.backward\\(loss\\) and distwrap"),
    (
        "own clip",
        "parameters\\(\\) between a backward and the step .*distwrap.optimizer_step\\(optimizer, max_norm=…\\)",
    ),
    ("not zeroed", "a second backward without zero_grad\\(\\) since the last step"),
    ("unused", "'unused.weight' has no gradient, as 1 others, since no forward used it"),
    ("unfrozen", "parameters of AdamW were added, frozen or unfrozen since wrap_optimizer"),
    ("two", "Net has another optimizer, and an engine of DeepSpeed has one"),
    ("two models", "the loss is one of Net and Net, which have an engine of DeepSpeed each"),
    ("others", "this SGD holds parameters that are not those of Net, and an engine of DeepSpeed has one model"),
    ("shaped", "what a step of ByRows looks at is not known"),
    ("closure", "step\\(closure\\) is not possible under strategy='deepspeed'"),
    ("float64", "the parameter 'scale' is in torch.float64, and DeepSpeed trains a copy in float32"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED, ids=[how for how, _ in REFUSED])
@STAGES
def test_what_an_engine_cannot_do_is_refused_by_name(stage: int, how: str, message: str) -> None:
    """Before it trains anything otherwise than one process."""
    with pytest.raises(ModelError, match=message):
        launch(DeepSpeedStrategy(stage=stage), refused, how)


def test_divided_weights_are_not_read_as_empty() -> None:
    """Under stage 3 a penalty over ``model.parameters()`` would be 0, where their numbers are on other ranks."""
    every = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    with pytest.raises(
        ModelError, match=r"under stage 3 of DeepSpeed, where the numbers of 'scale' are divided .*gathered"
    ):
        launch(DeepSpeedStrategy(stage=3, config=every), refused, "divided")


def scheduled() -> dict[str, torch.Tensor]:
    """Train with schedulers, one of the user's optimizer and one of what wraps it."""
    model = dw.wrap_model(net())
    users = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    first = torch.optim.lr_scheduler.StepLR(users, 1, 0.5)
    optimizer = dw.wrap_optimizer(users)
    second = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0)
    for _ in range(3):
        trained(model, optimizer, 1)
        (second if dw.world_size() == 0 else first).step()
    return model.state_dict()


@STAGES
def test_a_scheduler_of_the_users_optimizer_acts(stage: int) -> None:
    """The engine takes the rates of both objects, which have one set of groups."""
    expected = scheduled()
    for weights in launch(DeepSpeedStrategy(stage=stage), scheduled):
        assert_close(weights, expected)


def test_it_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed prints nothing, unless it may, also where a rank imports it."""
    launch(DeepSpeedStrategy(stage=3), plain_loop, launcher="spawn")
    assert capfd.readouterr() == ("", "")
    launch(DeepSpeedStrategy(stage=3, verbose=True), plain_loop)
    assert "DeepSpeed" in "".join(capfd.readouterr())


def of_blocks() -> tuple[int, dict[str, torch.Tensor]]:
    """Train a step of a language model of blocks, and count the forwards of its first norm."""
    model: Any = dw.wrap_model(language())
    optimizer = dw.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[int] = []
    norm = next(part for part in dw.unwrap_model(model).modules() if isinstance(part, (RMSNorm, nn.LayerNorm)))
    norm.register_forward_pre_hook(lambda *_: calls.append(1))
    dw.backward(model(texts()[dw.rank() :: 2, :-1]).logsumexp(-1).mean())
    optimizer.step()
    return len(calls), model.state_dict()


def language() -> Any:
    """Make a small language model whose weights are a seed's."""
    with torch.random.fork_rng():
        return Language("llama")


@STAGES
def test_activations_are_computed_again(stage: int) -> None:
    """Each block's forward runs again in the backward, with the same gradients."""
    plain = launch(DeepSpeedStrategy(stage=stage), of_blocks)
    again = launch(DeepSpeedStrategy(stage=stage, checkpointing=True), of_blocks)
    for (once, expected), (twice, found) in zip(plain, again, strict=True):
        assert (once, twice) == (1, 2)
        assert_close(found, expected)
