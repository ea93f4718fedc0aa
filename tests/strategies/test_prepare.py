"""What `wrap_model` and `wrap_optimizer` ask of a strategy, and what they make of its answers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import Strategy
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.model.wrapped_models import WrappedModels, bound_strategy
from distwrap.testing import run_ranks
from tests.strategies.by_hand import ByHand
from tests.strategies.wrappers import Around


class Minimal(Strategy):
    """The least that a strategy can be."""

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return Around(model)


def test_a_strategy_that_divides_nothing_is_held_to_replicas() -> None:
    """Where a strategy does not say what is held in parts, everything must be alike on all ranks."""

    def on_rank(ask: bool) -> None:
        torch.manual_seed(dw.rank())
        model = dw.wrap_model(nn.Linear(2, 1), strategy=Minimal())
        if ask:
            dw.assert_in_sync(model)

    for ask, where in ((True, "not the same on all ranks"), (False, "at the end")):
        with pytest.raises(ModelError, match=rf"{where}.*'weight' is the first that differs"):
            run_ranks(on_rank, 2, ask)


class Divided(Minimal):
    """A strategy whose ranks hold parts, and that does not say which."""

    shards = True


def test_parts_of_which_nothing_is_known_are_not_compared() -> None:
    def on_rank() -> None:
        torch.manual_seed(dw.rank())
        dw.assert_in_sync(dw.wrap_model(nn.Linear(2, 1), strategy=Divided()))

    run_ranks(on_rank, 2)


class Returned(Strategy):
    """A strategy that changes the model itself, as fully_shard does; what it is asked for, it notes in `asked`."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return model

    def backward(self, loss: torch.Tensor) -> None:
        self.asked.append("backward")
        super().backward(loss)

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        self.asked.append(f"sync {on}")

    def step(self, optimizer: torch.optim.Optimizer) -> bool | None:
        self.asked.append("step")
        return super().step(optimizer)

    def state(self, thing: nn.Module | torch.optim.Optimizer, *, everywhere: bool = False) -> dict[str, Any]:
        self.asked.append(f"state of {type(thing).__name__}")
        return super().state(thing, everywhere=everywhere)


def test_a_model_that_is_returned_as_it_is_stays_the_strategys(tmp_path: Any) -> None:
    """Without a wrapper around it a model is bound, and so is an optimizer that was not prepared, but no copy."""
    strategy = Returned()

    @dw.distributed(nprocs=1)
    def main() -> None:
        net = nn.Linear(2, 1)
        model = dw.wrap_model(net, strategy=strategy)
        assert model is net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dw.save({"model": model, "optimizer": optimizer}, tmp_path / "state.pt")
        for _, window in dw.accumulate([0], 1, model):
            dw.backward(model(torch.ones(1, 2)).sum() / window.size)
            dw.optimizer_step(optimizer)
        assert bound_strategy(copy.deepcopy(model)) is None

    main()
    assert strategy.asked == ["state of Linear", "state of SGD", "sync True", "backward", "step", "sync True"]


def test_the_first_step_proves_a_model_that_is_returned_as_it_is() -> None:
    """A model without a wrapper whose gradients nobody averages is found out after the first step."""

    def on_rank() -> None:
        torch.manual_seed(0)
        model = dw.wrap_model(nn.Linear(2, 1), strategy=Returned())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.full((1, 2), float(dw.rank()))).sum().backward()
            optimizer.step()
            dw.barrier()

    with pytest.raises(ModelError, match="'weight' is the first"):
        run_ranks(on_rank, 2)


def test_a_loss_of_two_strategies_is_refused() -> None:
    """Where two strategies have prepared models, and one has a backward of its own, nobody guesses whose a loss is."""

    @dw.distributed(nprocs=1)
    def main() -> None:
        strategy = Returned()
        one, other = (dw.wrap_model(nn.Linear(2, 1), strategy=strategy) for _ in range(2))
        dw.backward(one(torch.ones(1, 2)).sum() + other(torch.ones(1, 2)).sum())
        third = dw.wrap_model(nn.Linear(2, 1))
        with pytest.raises(ModelError, match="Returned and DDPStrategy"):
            dw.backward(third(torch.ones(1, 2)).sum())
        del one, other
        dw.backward(third(torch.ones(1, 2)).sum())
        assert strategy.asked == ["backward"]

    main()


def test_a_strategy_of_one_model_checks_the_run_first() -> None:
    """A strategy that ``wrap_model`` is given may refuse the run's options, and the model's precision."""
    with pytest.raises(OptionError, match="has no precision"):
        dw.wrap_model(nn.Linear(1, 1), strategy=ByHand(), precision="fp16")


class Wrong(Returned):
    """A strategy that forgets to return what it has prepared."""

    def prepare_model(self, model: Any, world: Any, wrapping: Any) -> Any:
        return None if isinstance(model, nn.Identity) else model

    def prepare_optimizer(self, optimizer: Any, model: Any) -> Any:
        return (optimizer, model)


def test_a_model_that_is_wrapped_again_counts_once() -> None:
    net = nn.Linear(1, 1)
    for _ in range(3):
        model = dw.wrap_model(net)
    assert [each for each in current_world().part(WrappedModels) if dw.unwrap_model(each) is net] == [model]


def test_what_a_strategy_returns_must_be_of_use() -> None:
    """A strategy that returns no module, or no optimizer, is named with its method."""
    with pytest.raises(ModelError, match=r"prepare_model.* NoneType"):
        dw.wrap_model(nn.Identity(), strategy=Wrong())
    model = dw.wrap_model(nn.Linear(1, 1), strategy=Wrong())
    with pytest.raises(ModelError, match=r"prepare_optimizer.* tuple"):
        dw.wrap_optimizer(torch.optim.SGD(model.parameters()))


class Pool(Around):
    """A wrapper that has a method by the name of one of DDP's wrapper here."""

    def release(self) -> None:
        raise AssertionError


class Pooling(Minimal):
    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return Pool(model)


def test_a_wrappers_own_methods_are_its_own() -> None:
    """At the end of a run nothing is called on a strategy's wrapper, whatever its methods are named."""

    def on_rank() -> None:
        model = dw.wrap_model(nn.Linear(1, 1), strategy=Pooling())
        current_world().part(WrappedModels).close()
        assert model.training

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("strategy", ["ddp", "single", "bagua"])
def test_misspelt_options_are_refused_in_one_process(strategy: str) -> None:
    """One process, which has no use for DDP's options, knows their names, and those of wrap_model itself."""
    dw.wrap_model(nn.Linear(1, 1), strategy=strategy, find_unused_parameters=True)
    for wrong, right in (("find_unused_paramters", "find_unused_parameters"), ("precison", "precision")):
        with pytest.raises(OptionError, match=rf"unknown option of wrap_model\(\) '{wrong}'. Did you mean '{right}'\?"):
            dw.wrap_model(nn.Linear(1, 1), strategy=strategy, **{wrong: True})


def test_misspelt_options_are_refused_on_several_ranks() -> None:
    """Several ranks refuse an option with the words of one process."""

    def on_rank() -> None:
        dw.wrap_model(nn.Linear(1, 1), find_unused_paramters=True)

    with pytest.raises(OptionError, match="'find_unused_parameters'"):
        run_ranks(on_rank, 2)


class Alone(dw.DDPStrategy):
    """A strategy that does not hand on what an algorithm of exchange would have to know."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> torch.optim.Optimizer:
        return optimizer


def test_an_optimizer_that_a_strategy_does_not_hand_on() -> None:
    """Where comm='qadam' does not get to know an optimizer, it says that the strategy may have kept it."""

    @dw.distributed(nprocs=2, strategy=Alone(), comm="qadam")
    def main() -> None:
        model = dw.wrap_model(nn.Linear(1, 1))
        dw.wrap_optimizer(torch.optim.Adam(model.parameters()), model)
        model(torch.ones(1, 1)).sum().backward()

    with pytest.raises(ModelError, match="must call super"):
        main()
