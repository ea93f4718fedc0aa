"""Ranks that train the rows of a launch one after the other; imported by tests, and run as a script by launchers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

import distwrap as dw
from distwrap.environments import Placement
from distwrap.group.world import Layout, World, current_world
from distwrap.testing.behaviours import FP16_TOLERANCE
from distwrap.testing.sides import Trial
from tests.conformance.precisions import BF16_TOLERANCE
from tests.equality.loops import LOOPS
from tests.equality.on_ranks import perform
from tests.equality.rows import STRATEGIES, Row, group

LIMIT = 60.0  # seconds, as a guard
# By how much weights may differ from one process's.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bf16": BF16_TOLERANCE, "fp16": FP16_TOLERANCE}


def train(rows: list[Row], folder: Path) -> None:
    """Train each row, and write how it went."""
    placement = current_world().placement
    try:
        perform({str(row): partial(_as_one_process, row, placement) for row in rows}, folder, LIMIT)
    finally:
        _put_under(current_world(), "ddp", placement)


def _as_one_process(row: Row, placement: Placement, trial: Trial) -> None:
    _put_under(trial.world, row.strategy, placement)
    precision = row.precision if row.precision in ("bf16", "fp16") else "32"
    side = Trial(trial.world, trial.folder, precision)
    side.same(partial(_trained, row), precision=precision, tolerance=TOLERANCES[row.precision])


def _trained(row: Row, side: Trial) -> object:
    torch.manual_seed(0)
    return LOOPS[row.step](side, row)


def _put_under(world: World, strategy: str, placement: Placement) -> None:
    """Let a run go on under another strategy, which arranges its ranks as at a start."""
    vars(world).pop("strategy", None)
    world.placement, world.layout = placement, Layout(placement.rank, placement.world_size)
    world.options = world.options.updated({"strategy": STRATEGIES[strategy]})
    world.arrange()


def of_launch(launch: str, is_fast: bool, folder: Path) -> None:
    """Train the rows of a launch."""
    train(group(launch, is_fast), folder)


if __name__ == "__main__":
    dw.distributed(nprocs=2, timeout=250)(of_launch)(sys.argv[1], False, Path(sys.argv[2]))
