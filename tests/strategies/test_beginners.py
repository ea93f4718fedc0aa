"""What people do at first with a divided model: it is right, or the error says what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distwrap as dw
from distwrap import distributed
from distwrap.errors import DistwrapError, ModelError
from distwrap.group.world import current_world
from tests.plans import TP


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) - 1).square().mean()


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        module.bias.data.uniform_(-1, 1)


def _drawn_anew() -> dict[str, torch.Tensor]:
    """Return the weights of a model that draws its numbers once it is wrapped."""
    model = dw.wrap_model(Net())
    torch.manual_seed(5)
    model.apply(_init)
    state = current_world().strategy.state(model, everywhere=True)
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.slow("makes many mistakes, each in a launch of its own")
def test_numbers_drawn_after_wrapping_are_those_of_one_process() -> None:
    """Each rank keeps its share of the numbers that one process draws, not the same numbers as the others."""
    expected = distributed(nprocs=1, strategy="ddp")(_drawn_anew)()
    for strategy in ("fsdp", TP):
        found = distributed(nprocs=2, strategy=strategy)(_drawn_anew)()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), strategy


def _batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    (model(_batch()) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _reads() -> list[object]:
    torch.manual_seed(0)
    model = dw.wrap_model(Net())
    weight = next(value for name, value in model.named_parameters() if name.endswith("weight"))
    weight = weight.detach()
    return [weight.norm().item(), float(weight.sum()), weight.tolist(), f"{weight.norm():.4f}", weight.sum() > 9]


@pytest.mark.slow("makes many mistakes, each in a launch of its own")
def test_numbers_that_a_loop_reads() -> None:
    """A norm or a sum of a weight is the whole weight's, on every rank."""
    expected = distributed(nprocs=1, strategy="ddp")(_reads)()
    for strategy in ("fsdp", TP):
        found = distributed(nprocs=2, strategy=strategy)(lambda: [*_reads()[:4], bool(_reads()[4])])()
        assert found[:2] == pytest.approx(expected[:2]), strategy
        assert found[2:] == [*expected[2:4], bool(expected[4])], strategy


def _loads_past_the_wrapper(model: Any, optimizer: Any, path: str) -> object:
    return dw.unwrap_model(model).load_state_dict(Net().state_dict())


def _calls_a_part(model: Any, optimizer: Any, path: str) -> object:
    return next(part for part in model.modules() if isinstance(part, nn.Linear))(_batch())


def _averages(model: Any, optimizer: Any, path: str) -> object:
    with torch.no_grad():
        return [mean.lerp_(new, 0.1) for mean, new in zip(Net().parameters(), model.parameters(), strict=True)]


def _adds_a_norm(model: Any, optimizer: Any, path: str) -> object:
    norm = sum(parameter.square().sum() for parameter in model.parameters())
    return (model(_batch()).mean() + norm).backward()


def _saves_a_state_dict(model: Any, optimizer: Any, path: str) -> object:
    return dw.save({"model": model.state_dict()}, path)


def _wraps_in_ddp(model: Any, optimizer: Any, path: str) -> object:
    return DistributedDataParallel(model)


def _ties_later(model: Any, optimizer: Any, path: str) -> object:
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model.loss(_batch())


def _wraps_twice(model: Any, optimizer: Any, path: str) -> object:
    return dw.wrap_model(model)


def _leaves_early(model: Any, optimizer: Any, path: str) -> object:
    _step(model, optimizer)
    return None if dw.rank() == 1 else _step(model, optimizer)


def _evaluates_alone(model: Any, optimizer: Any, path: str) -> object:
    _step(model, optimizer)
    if dw.rank() == 0:
        with torch.no_grad():
            model(_batch())
    return _step(model, optimizer)


Mistake = Callable[[Any, Any, str], object]

# With what to do, in the error's words. Those of the second table end the run.
MISTAKES: dict[Mistake, str] = {
    _loads_past_the_wrapper: r"Load through what wrap_model\(\) returned, model.load_state_dict\(state\)",
    _calls_a_part: r"Call the model itself, or a method of it .* a part of the model, as model.head",
    _averages: "Wrap a second model, as an average",
    _saves_a_state_dict: r"Give save\(\) the model and the optimizer themselves: save\(\{'model': model",
    _ties_later: r"is no longer the parameter that wrap_model\(\) has made",
    _wraps_in_ddp: r"DistributedDataParallel got a \w*Net that wrap_model\(\) has wrapped",
    _wraps_twice: r"wrap_model\(\) got a \w*Net that is in a wrapper of wrap_model\(\) already",
}
ENDING: dict[Mistake, str] = {
    _adds_a_norm: r"take .full_tensor\(\) of what is computed of each one",
    _leaves_early: "rank 1 has left the function.*run it equally often on every rank",
    _evaluates_alone: r"rank 0 runs forward 1 of \w*Net without gradients.*if rank\(\) == 0",
}


@distributed(nprocs=2, strategy="fsdp")
def _made(mistakes: list[Mistake], path: str) -> dict[str, str]:
    found = {}
    for mistake in mistakes:
        model = dw.wrap_model(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises((DistwrapError, RuntimeError)) as refusal:
            mistake(model, optimizer, path)
        found[mistake.__name__] = str(dw.model.checks.diagnosis.explained(refusal.value))  # type: ignore[arg-type]
    return found


@pytest.mark.slow("makes many mistakes, each in a launch of its own")
def test_the_first_mistakes_are_answered_with_what_to_do(tmp_path: Path) -> None:
    """Each error names one way out, which is that of the mistake."""
    found = _made([*MISTAKES], str(tmp_path / "a.pt"))
    for mistake, words in MISTAKES.items():
        assert re.search(words, found[mistake.__name__]), found[mistake.__name__]


@distributed(nprocs=2, strategy="fsdp")
def _ends(mistake: Mistake, path: str) -> None:
    model = dw.wrap_model(Net())
    mistake(model, torch.optim.AdamW(model.parameters()), path)


@pytest.mark.parametrize("mistake", ENDING, ids=lambda mistake: mistake.__name__)
@pytest.mark.slow("makes many mistakes, each in a launch of its own")
def test_mistakes_in_a_loop_end_with_what_to_do(mistake: Mistake, tmp_path: Path) -> None:
    """Where ranks part, or a step goes wrong, the error names the cause rather than another one."""
    with pytest.raises(DistwrapError, match=ENDING[mistake]):
        _ends(mistake, str(tmp_path / "a.pt"))


def _steps_a_copy(before: bool) -> None:
    net = Net()
    copied = torch.optim.SGD(Net().parameters(), lr=0.1) if before else None
    model = dw.wrap_model(copy.deepcopy(net))
    for _ in range(2):
        _step(model, copied or torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", TP, "pipeline"])
@pytest.mark.slow("makes many mistakes, each in a launch of its own")
def test_an_optimizer_of_a_copy_is_an_error(strategy: str) -> None:
    """It would train nothing, whenever it was made."""
    for before in (True, False):
        with pytest.raises(ModelError, match="holds none"):
            distributed(nprocs=2, strategy=strategy)(_steps_a_copy)(before)


class Drawn(nn.Module):
    """Draws its numbers anew in its constructor, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)


def test_numbers_that_an_empty_model_loses_are_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a constructor does to weights without numbers is told, unless reset_parameters() does it."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    with dw.init_empty():
        nn.TransformerEncoderLayer(4, 2, 8)
    assert capfd.readouterr().err == ""
    with dw.init_empty():
        Drawn()
    assert "init_empty(): _init_weights() set weights that have no numbers" in capfd.readouterr().err


@distributed(nprocs=2, strategy="pipeline")
def _saves_a_pipelines_state_dict(path: str) -> None:
    model = dw.wrap_model(Net())
    copy.copy(model.state_dict())
    dw.save({"model": model.state_dict()}, path)


def test_a_pipelines_state_dict_is_refused_with_the_model_to_save(tmp_path: Path) -> None:
    with pytest.raises(DistwrapError, match="give save"):
        _saves_a_pipelines_state_dict(str(tmp_path / "a.pt"))


def test_what_is_refused_is_a_model_error() -> None:
    """A wrapped model that is not divided is no model for DDP either."""

    def on_rank() -> None:
        with pytest.raises(ModelError, match="Use what wrap_model"):
            DistributedDataParallel(dw.wrap_model(nn.Linear(1, 1)))

    dw.testing.run_ranks(on_rank, 2)
