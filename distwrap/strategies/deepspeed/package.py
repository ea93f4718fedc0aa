"""The package deepspeed: imported for a rank's device, without output, and without a compiler at its start."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distwrap.group.world import World


def import_deepspeed(world: World, *, verbose: bool) -> Any:
    """Import the package for the device of this rank, and return it; it is silent unless `verbose`."""
    with quiet(verbose), environment(world):
        import deepspeed
    deepspeed.utils.logging.set_log_level_from_string("info" if verbose else "error")
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    return deepspeed


@contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Keep DeepSpeed from printing within a ``with``."""
    before = logging.root.manager.disable
    if not verbose:
        logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def environment(world: World) -> Iterator[None]:
    """Set the variables from which DeepSpeed reads its device and ranks, unless they are set."""
    place = world.placement
    wanted = {"LOCAL_RANK": place.local_rank, "RANK": place.rank, "WORLD_SIZE": place.world_size}
    kind = {"DS_ACCELERATOR": "cpu"} if world.device.type == "cpu" else {}
    added = {name: str(value) for name, value in {**wanted, **kind}.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep DeepSpeed from building its shared-memory exchange, which takes a compiler minutes."""
    comm: Any = sys.modules["deepspeed.comm.torch"]
    build = comm.build_shm_op
    comm.build_shm_op = lambda: None
    try:
        yield
    finally:
        comm.build_shm_op = build


def forget_group() -> None:
    """Release DeepSpeed's reference to the process group when a run ends."""
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None
