"""One rank's part of a suite in one launch: it does one thing after the other, and writes how each went."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from distwrap.group.optimizer_steps import OptimizerSteps
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.checks.optimizers import Optimizers
from distwrap.seeding import preserved
from distwrap.testing.sides import Trial
from distwrap.wording import named_ranks

Parts = dict[type[RunPart], RunPart]

_POLL = 0.001


def perform(bodies: dict[str, Callable[[Trial], None]], folder: Path, limit: float) -> None:
    """Do bodies one after the other, in step with the other ranks.

    Args:
        bodies: by their names; each raises where something is wrong.
        folder: for the verdicts, the same on all ranks.
        limit: seconds that a rank waits for the others at the end of a body.

    Raises:
        AssertionError: the others did not come to its end.
    """
    torch.set_num_threads(1)  # the nets are too small for more
    world = current_world()
    # Of these a run of one body alone has parts anew: the models', and what listens to steps.
    renewed = (Optimizers.__module__.rpartition(".")[0], OptimizerSteps.__module__)
    first = {kind: part for kind, part in world._parts.items() if not kind.__module__.startswith(renewed)}
    _begin_anew(world, first)
    for name, body in bodies.items():
        here = folder / name
        here.mkdir(exist_ok=True)
        words = _tried(body, world, first, here)
        _put(here, f"verdict.{world.placement.rank}", words)
        _await_others(here, name, world, limit, words)


def verdicts(folder: Path, name: str) -> list[str]:
    """Return the verdicts over a body of the ranks that have come to its end: nothing, or the error."""
    return [path.read_text() for path in sorted((folder / name).glob("verdict.*"))]


def _tried(body: Callable[[Trial], None], world: World, first: Parts, folder: Path) -> str:
    options, words = world.options, ""
    try:
        if world.channel is not None:
            world.part(Optimizers)
        with preserved():
            body(Trial(world, folder))
    except Exception as error:  # noqa: BLE001 - the verdict has it
        words = repr(error)
    world.options = options  # which hold the seed
    try:
        _begin_anew(world, first)
    except Exception as error:  # noqa: BLE001 - as of ranks that drifted apart
        words = words or repr(error)
    return words


def _begin_anew(world: World, first: Parts) -> None:
    """Bring to an end all that a body has left in the run, but for the parts that the run has had at first."""
    try:
        world.settle()
    finally:
        world._parts = {kind: part for kind, part in world._parts.items() if kind not in first}
        world.close()
        world._parts = dict(first)
        if world.channel is not None:
            world.channel.order.begin_anew()


def _put(folder: Path, name: str, text: str) -> None:
    """Write a file that is there whole or not at all."""
    unfinished = folder / f"unfinished.{os.getpid()}"
    unfinished.write_text(text)
    os.replace(unfinished, folder / name)


def _await_others(folder: Path, name: str, world: World, limit: float, words: str) -> None:
    waiting = set(range(world.placement.world_size))
    end = time.monotonic() + limit
    while waiting:
        waiting = {rank for rank in waiting if not (folder / f"verdict.{rank}").exists()}
        if waiting and time.monotonic() > end:
            raise AssertionError(f"{name}: {named_ranks(waiting)} did not come to its end in {limit:g} s. {words}")
        if waiting:
            time.sleep(_POLL)
