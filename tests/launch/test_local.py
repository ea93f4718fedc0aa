"""The launchers on one machine, and `run_ranks` above them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import distwrap as dw
from distwrap.errors import WorkerDiedError
from distwrap.network.waiting import wait_until
from distwrap.testing import run_ranks
from tests.limits import SOON
from tests.orphans import lives


@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
def test_every_launcher_returns_what_the_ranks_return(launcher: str) -> None:
    """With `returns="all"` the caller has each rank's value, in order."""

    def own_rank() -> int:
        return dw.rank()

    assert dw.distributed(nprocs=2, launcher=launcher, returns="all")(own_rank)() == [0, 1]


@pytest.mark.parametrize("launcher", ["fork", "forkserver"])
def test_what_a_rank_has_started_does_not_hide_its_end(launcher: str, tmp_path: Path) -> None:
    """A rank's death is noticed at once, though a program that it has started lives on; that is ended too."""

    @dw.distributed(nprocs=2, launcher=launcher)
    def starts_and_dies() -> None:
        dw.barrier()
        if dw.rank() == 1:
            (tmp_path / "pid").write_text(str(subprocess.Popen(["sleep", "90"]).pid))
            os._exit(3)
        dw.barrier()

    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* exit code 3"):
        starts_and_dies()
    assert time.monotonic() - start < SOON
    pid = int((tmp_path / "pid").read_text())
    if not wait_until(lambda: not lives(pid), 5):
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("what the rank had started lives on")


def test_run_ranks_hands_arguments_on() -> None:
    """A test body gets the arguments, and its values come back in order."""
    assert run_ranks(lambda number: number + dw.rank(), 2, 3) == [3, 4]


def test_a_module_that_chooses_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads that the user's module sets when it is imported holds in the ranks too."""
    (tmp_path / "chooses_threads.py").write_text(
        "import torch\ntorch.set_num_threads(3)\ndef threads():\n    return torch.get_num_threads()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        from chooses_threads import threads

        assert dw.distributed(nprocs=2, launcher="forkserver", returns="all")(threads)() == [3, 3]
    finally:
        torch.set_num_threads(before)
