"""Behaviours of whole runs: of one process, retrofitted, with an exception on one rank."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from distwrap.group.world import current_world
from distwrap.testing.nets import SmallNet, examples, small
from distwrap.testing.sides import Trial, adamw, compare, fit
from tests.conformance.base import behaviour


@behaviour(launches=True)
def retrofit(launch: Callable[..., list[Any]]) -> None:
    """Train a loop that knows nothing of distwrap; the caller's model and optimizer have what was trained."""

    def trained(run: Callable[..., Any], share: int) -> Any:
        model = small()
        optimizer = adamw(model.parameters())
        loader = DataLoader(TensorDataset(*examples(16 * shares)), batch_size=share)
        run(_plain_loop, model, optimizer, loader)
        return dict(model.state_dict()), optimizer.state_dict()["state"]

    [shares, *_] = launch(_shares)
    expected = trained(lambda loop, *args: loop(*args), 4 * shares)
    compare(trained(partial(launch, retrofit=True), 4), expected)


def _shares() -> int:
    return current_world().layout.size


def _plain_loop(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        model.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@behaviour(launches=True)
def one_process(launch: Callable[..., list[Any]]) -> None:
    """Run the same script on one process: every helper is a plain call."""
    launch(_in_one_process, nprocs=1)


def _in_one_process() -> None:
    trial = Trial(current_world(), Path())
    assert trial.size == 1
    trial.same(fit)
    trial.same(lambda side: fit(side, adamw))


class UntrainableError(Exception):
    """Exception of a user's own forward."""


class RaisingNet(SmallNet):
    """Net whose forward raises on the last rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, or raise."""
        if current_world().placement.rank == current_world().placement.world_size - 1:
            raise UntrainableError("the last rank's forward")
        return super().forward(x)


@behaviour(launches=True)
def an_exception_ends_all_ranks(launch: Callable[..., list[Any]]) -> None:
    """Raise in the caller what a forward has raised on one rank, while the others wait for it."""
    try:
        launch(_raising)
    except UntrainableError:
        return
    raise AssertionError("the forward of the last rank raised, and the run went on")


def _raising() -> None:
    trial = Trial(current_world(), Path())
    fit(trial, model=trial.wrap(small(RaisingNet)))
