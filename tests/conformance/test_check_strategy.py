"""The conformance suite notices what a strategy does wrong, and goes on with the rest."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from torch import nn

from distwrap import DDPStrategy, rank
from distwrap.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConformanceError,
    DriftError,
    ModelError,
    OptionError,
    WorkerError,
)
from distwrap.group.world import RunPart
from distwrap.testing import check_strategy, conformance
from distwrap.testing.behaviours import Behaviour
from distwrap.testing.conformance import check_behaviours
from tests.strategies.wrappers import Copy

BROKEN = {kind.__name__: kind for kind in (CollectiveTimeoutError, CollectiveError, DriftError, WorkerError)}
AROUND = ["loaders_go_by_share", "ranks_are_in_sync"]  # which nothing here breaks


class WrongClip(DDPStrategy):
    """DDP whose clip goes wrong in a way that is asked for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def clip(self, optimizer: Any, parameters: Any, max_norm: float) -> Any:
        norm = super().clip(optimizer, parameters, max_norm)
        if self.how == "half the norm":
            return norm / 2
        if self.how == "refused":
            raise OptionError("WrongClip clips nothing. Leave max_norm out.")
        if self.how in BROKEN:
            raise BROKEN[self.how]("in a clip")
        if rank() == 1 and self.how == "hangs":
            time.sleep(60)
        if rank() == 1 and self.how == "dies":
            os._exit(3)
        if rank() == 1 and self.how == "raises":
            raise ZeroDivisionError("on rank 1")
        return norm


class Apart(DDPStrategy):
    """A strategy that averages nothing."""

    def prepare_model(self, model: nn.Module, world: Any, wrapping: Any) -> nn.Module:
        return Copy(model)

    def held(self, model: nn.Module) -> Any:
        return ()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("half the norm", r"clip_tells_the_norm: AssertionError: Scalars are not close"),
        ("refused", r"clip_tells_the_norm: refused, where refuses= does not list it: OptionError: WrongClip clips"),
        ("hangs", r"clip_tells_the_norm: CollectiveTimeoutError: "),
        ("dies", r"clip_tells_the_norm: WorkerDiedError: .*rank 1"),
        ("raises", r"clip_tells_the_norm: ZeroDivisionError: on rank 1"),
    ],
)
@pytest.mark.slow("ends ranks that hang, one after the other")
def test_what_goes_wrong_is_told_by_name(how: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number, a hang, a death, an exception on one rank: the behaviour is named, and the others have run."""
    monkeypatch.setattr(conformance, "_LIMIT", 1.0)
    with pytest.raises(ConformanceError, match=words) as caught:
        check_strategy(WrongClip(how), only=["clip_tells_the_norm", *AROUND])
    assert "1 of 3 behaviours failed" in str(caught.value)


def test_a_refusal_by_name_is_no_failure() -> None:
    """What a strategy says that it refuses, it must refuse, by an error of distwrap's."""
    results = dict(check_strategy(WrongClip("refused"), only=["clip_tells_the_norm"], refuses=["clip_tells_the_norm"]))
    assert results["clip_tells_the_norm"].startswith("refused: OptionError: WrongClip clips nothing")
    with pytest.raises(ConformanceError, match=r"ranks_are_in_sync: .* refuses= lists"):
        check_strategy("ddp", 1, only=AROUND, refuses=["ranks_are_in_sync"])


class RanksApart(RunPart):
    """A part of a run that finds the ranks apart as it ends."""

    def __init__(self, world: Any) -> None:
        pass

    def wait(self) -> None:
        raise DriftError("apart")


def refused_with_ranks_apart(trial: Any) -> None:
    """Refuse, and leave the ranks apart."""
    trial.world.part(RanksApart)
    raise ModelError("refused late")


def test_what_any_strategy_may_refuse_it_may_refuse_late() -> None:
    """DDP names parameters without gradients a step too late: the drift of that step is no failure; elsewhere it is."""
    late = {"late": Behaviour(refused_with_ranks_apart, may_refuse=True)}
    assert check_behaviours(late, "ddp", 1) == (("late", "refused: ModelError: refused late"),)
    with pytest.raises(ConformanceError, match="late: DriftError: apart"):
        check_behaviours({"late": Behaviour(refused_with_ranks_apart)}, "ddp", 1, refuses=["late"])


def refused_by_one(trial: Any) -> None:
    """Refuse on one rank."""
    if trial.rank == 1:
        raise ModelError("refused here")


def test_a_refusal_is_every_ranks() -> None:
    """What one rank refuses alone, the others have done."""
    with pytest.raises(ConformanceError, match="alone: refused on rank 1 of 2 alone: ModelError: refused here"):
        check_behaviours({"alone": Behaviour(refused_by_one)}, "ddp", 2, refuses=["alone"])


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_run_is_no_refusal(how: str) -> None:
    """A hang, ranks that disagree or that have trained apart: where ``refuses=`` names the behaviour too."""
    with pytest.raises(ConformanceError, match=f"clip_tells_the_norm: {how}: in a clip"):
        check_strategy(WrongClip(how), only=["clip_tells_the_norm"], refuses=["clip_tells_the_norm"])


@pytest.mark.slow("ends ranks that hang, one after the other")
def test_numbers_are_compared_with_one_process() -> None:
    """A strategy under which each rank trains alone fails wherever a number comes out."""
    with pytest.raises(ConformanceError) as caught:
        check_strategy(
            Apart(), only=["adamw_in_float64", "scale_loss_by_count", "resume_from_parts", "loaders_go_by_share"]
        )
    assert "3 of 4 behaviours failed" in str(caught.value)


def test_unknown_names_are_refused_before_any_process_starts() -> None:
    """A name that no behaviour has is told with the nearest one."""
    with pytest.raises(OptionError, match="'uneven_evaluation'"):
        check_strategy("ddp", refuses=["uneven_evaluations"])
    with pytest.raises(OptionError, match="unknown strategy"):
        check_strategy("dpp")


class Unarranged(DDPStrategy):
    """A strategy whose ranks cannot be arranged."""

    def setup(self, world: Any) -> Any:
        raise ZeroDivisionError("no mesh")


def test_a_strategy_that_cannot_start_is_told_once() -> None:
    """Where no behaviour can begin, the error of the start is raised as it is."""
    with pytest.raises(ZeroDivisionError, match="no mesh"):
        check_strategy(Unarranged(), only=AROUND)
