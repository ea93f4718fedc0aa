"""The launchers on one machine, and `run_ranks` above them."""

from __future__ import annotations

import pytest

import distwrap as dw
from distwrap.testing import run_ranks


@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
def test_every_launcher_returns_what_the_ranks_return(launcher: str) -> None:
    """With `returns="all"` the caller has each rank's value, in order."""

    def own_rank() -> int:
        return dw.rank()

    assert dw.distributed(nprocs=2, launcher=launcher, returns="all")(own_rank)() == [0, 1]


def test_run_ranks_hands_arguments_on() -> None:
    """A test body gets the arguments, and its values come back in order."""
    assert run_ranks(lambda number: number + dw.rank(), 2, 3) == [3, 4]
