"""What a save tells of the loss of a rank follows from that, on every rank: the loss itself is the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distwrap import rank, save, wait_for_saves
from distwrap.errors import CheckpointError, WorkerError
from distwrap.group.failures import is_secondary
from distwrap.testing import run_ranks

LOST = WorkerError("rank 2 ended inside a collective", secondary=True)
FULL = OSError(28, "No space left on device")


class Failing:
    """A format that all ranks write, which fails on rank 1."""

    collective = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def over(self, group: Any) -> Failing:
        return self

    def save(self, state: Any, path: Path) -> None:
        if rank() == 1:
            raise self._error

    def load(self, path: Path, map_location: Any) -> Any:
        raise NotImplementedError


def save_whole(folder: str, io: Failing, *, background: bool) -> None:
    save({"x": 1}, Path(folder, "last"), io=io, background=background)
    wait_for_saves()


def told(folder: str) -> list[tuple[bool, bool]]:
    """Return of each save whether its error names rank 1, and is a secondary failure."""
    found = []
    for background in (False, True):
        for error in (LOST, FULL):
            with pytest.raises(CheckpointError) as raised:
                save_whole(folder, Failing(error), background=background)
            found.append(("rank 1 on " in str(raised.value), is_secondary(raised.value)))
    return found


def test_it_follows_from_the_loss_on_every_rank(tmp_path: Path) -> None:
    """Now and in the background; a full disk, of which a rank tells, is a cause of its own."""
    expected = [(True, True), (True, False)] * 2
    assert run_ranks(told, 2, str(tmp_path)) == [expected] * 2
