"""One rank's part of the conformance suite: it does the behaviours one after the other, and writes how each went."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from distwrap.errors import CollectiveError, ConformanceError, DriftError, ModelError, OptionError, PrecisionError
from distwrap.group.optimizer_steps import OptimizerSteps
from distwrap.group.world import RunPart, World, current_world
from distwrap.model.optimizers import Optimizers
from distwrap.seeding import preserved
from distwrap.testing.behaviours.base import Behaviour
from distwrap.testing.behaviours.sides import Trial
from distwrap.wording import named_ranks

Parts = dict[type[RunPart], RunPart]

# Errors that say what a strategy does not do. A hang, or ranks that have trained apart, is what it has done.
_REFUSALS = (ModelError, OptionError, PrecisionError)
_POLL = 0.001
_IN_VAIN = "in_vain"


@dataclass(frozen=True)
class Verdict:
    """Result of a behaviour on one rank, or on all of them.

    Attributes:
        how: the behaviour went.
        words: the message of the refusal or of the failure.
    """

    how: Literal["passed", "refused", "failed"]
    words: str = ""

    @classmethod
    def of(cls, error: BaseException, behaviour: Behaviour) -> Verdict:
        """Return the verdict over a behaviour that raised an error."""
        refusals = (*_REFUSALS, CollectiveError) if behaviour.may_refuse else _REFUSALS
        is_refusal = isinstance(error, refusals) and not isinstance(error, (DriftError, TimeoutError))
        return cls("refused" if is_refusal else "failed", words_of(error))


def words_of(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def perform(behaviours: dict[str, Behaviour], folder: Path, limit: float) -> None:
    """Do behaviours one after the other, in step with the other ranks.

    Args:
        behaviours: by their names.
        folder: for the verdicts, the same on all ranks.
        limit: seconds that a rank waits for the others at the end of a behaviour.

    Raises:
        ConformanceError: the others did not come to its end.
    """
    torch.set_num_threads(1)  # the nets are too small for more
    world = current_world()
    # Of these a run of one behaviour alone has parts anew: the models', and what listens to steps.
    renewed = (Optimizers.__module__.rpartition(".")[0], OptimizerSteps.__module__)
    first = {kind: part for kind, part in world._parts.items() if not kind.__module__.startswith(renewed)}
    _begin_anew(world, first)
    for name, behaviour in behaviours.items():
        here = folder / name
        here.mkdir(exist_ok=True)
        verdict = _tried(behaviour, world, first, here)
        _put(here, f"verdict.{world.placement.rank}", json.dumps(asdict(verdict)))
        _await_others(here, name, world, limit, verdict)


def verdicts(folder: Path, name: str) -> dict[int, Verdict]:
    """Return the verdicts over a behaviour of the ranks that have come to its end."""
    return {int(path.suffix[1:]): Verdict(**json.loads(path.read_text())) for path in (folder / name).glob("verdict.*")}


def words_of_end(folder: Path, name: str) -> str:
    """Return what a rank has said that waited for the others in vain; empty where none has."""
    said = folder / name / _IN_VAIN
    return said.read_text() if said.exists() else ""


def _tried(behaviour: Behaviour, world: World, first: Parts, folder: Path) -> Verdict:
    options = world.options
    try:
        if world.channel is not None:
            world.part(Optimizers)
        with preserved():
            behaviour.body(Trial(world, folder))
        verdict = Verdict("passed")
    except Exception as error:  # noqa: BLE001 - the verdict has it
        verdict = Verdict.of(error, behaviour)
    world.options = options  # which hold the seed
    try:
        _begin_anew(world, first)
    except Exception as error:  # noqa: BLE001 - as of ranks that drifted apart
        # What any strategy may refuse is refused by DDP at the step after the one that left the ranks apart.
        refused_in_time = verdict.how == "refused" and not behaviour.may_refuse
        if verdict.how == "passed" or (refused_in_time and isinstance(error, DriftError)):
            verdict = Verdict("failed", words_of(error))
    return verdict


def _begin_anew(world: World, first: Parts) -> None:
    """Bring to an end all that a behaviour has left in the run, but for the parts that the run has had at first."""
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


def _await_others(folder: Path, name: str, world: World, limit: float, own: Verdict) -> None:
    waiting = set(range(world.placement.world_size))
    end = time.monotonic() + limit
    while waiting:
        waiting = {rank for rank in waiting if not (folder / f"verdict.{rank}").exists()}
        if waiting and time.monotonic() > end:
            rank = world.placement.rank
            words = f"rank {rank} {own.how}, and {named_ranks(waiting)} did not come to its end in {limit:g} s"
            words += own.words and f": {own.words}"
            _put(folder, _IN_VAIN, words)
            raise ConformanceError(f"{name}: {words}")
        if waiting:
            time.sleep(_POLL)
