"""A launcher from outside: one file, whose ranks are nobody's children of ours, with files in place of pipes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.environments import Placement
from distwrap.errors import LaunchError, OptionError, WorkerDiedError
from distwrap.launch import transport, worker
from distwrap.launch.base import Job, Launcher
from distwrap.launch.fork import ForkLauncher
from distwrap.launch.outcome import Outcome, death, failure, raise_if_failed, success
from distwrap.launch.task import Assignment
from distwrap.registry import launchers
from tests.forked_commands import PYTHON
from tests.orphans import lives

SECONDS = 60.0


class FolderLauncher(Launcher):
    """Ranks that a stranger starts (here a shell, which leaves at once), and that read and write files.

    They are no children of this process: there is no pipe, no process to wait for, and no signal when this one dies.
    """

    name = "folder"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def check(self, job: Job) -> None:
        if job.nprocs > 4:
            raise LaunchError("launcher='folder' starts at most 4 ranks.")

    def run(self, job: Job, plan: Assignment) -> list[Outcome]:
        pids = {}
        for rank in range(job.nprocs):
            place = Placement(rank, job.nprocs, rank, job.nprocs, source="distwrap")
            assignment = replace(plan, placement=place, store=str(self._folder / "store"))
            (self._folder / f"assignment.{rank}").write_bytes(pickle.dumps(assignment))
            command = f"'{PYTHON}' '{__file__}' '{self._folder}' {rank} >&2 & echo $!"
            pids[rank] = int(subprocess.check_output(command, shell=True, text=True, env=_environment()))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + SECONDS
        while len(outcomes) < job.nprocs and time.monotonic() < deadline:
            for rank in pids.keys() - outcomes.keys():
                own = self._folder / f"pid.{rank}"
                if own.exists():  # it may be a fork that the command has asked for, and waits for
                    pids[rank] = int(own.read_text() or pids[rank])
                file, alive = self._folder / f"outcome.{rank}", lives(pids[rank])
                if file.exists():
                    outcomes[rank] = pickle.loads(file.read_bytes())
                elif not alive:
                    outcomes[rank] = death(rank, pids[rank], None)
            failed = [outcome for outcome in outcomes.values() if outcome.failed]
            if failed:
                for pid in filter(lives, pids.values()):
                    os.kill(pid, 9)
                raise_if_failed(outcomes.values())
            time.sleep(0.02)
        return [outcomes[rank] for rank in range(job.nprocs)]


class FolderLink:
    """The rank's end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def bind_lifetime(self) -> None:
        """Nothing ties this process's life to the launcher's."""

    def assignment(self) -> Assignment:
        assignment: Assignment = pickle.loads((self._folder / f"assignment.{self._rank}").read_bytes())
        return assignment

    def report(self, outcome: Outcome) -> None:
        part = self._folder / f"part.{self._rank}"
        part.write_bytes(pickle.dumps(outcome))
        part.rename(self._folder / f"outcome.{self._rank}")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(autouse=True)
def registered(tmp_path: Path) -> Any:
    """The launcher under a name, for one test."""
    dw.register_launcher("folder", FolderLauncher, "files in a folder", folder=str(tmp_path))
    yield
    del launchers._rows["folder"]


class Mine(Exception):
    """An exception of the user's own."""


def ranks() -> tuple[int, int]:
    return dw.rank(), int(dw.gather(dw.rank()).sum())


def test_its_name_is_known() -> None:
    """A registered launcher is listed, and a wrong name is still refused."""
    assert dw.available_launchers()["folder"] == "files in a folder"
    with pytest.raises(OptionError, match=r"unknown launcher 'foldr'\. Did you mean 'folder'\?"):
        dw.distributed(launcher="foldr")


@pytest.mark.slow("ranks of a stranger")
def test_values_come_home() -> None:
    """Every rank's value comes back in rank order."""
    assert dw.distributed(nprocs=2, launcher="folder", returns="all", timeout=30)(ranks)() == [(0, 1), (1, 1)]


@pytest.mark.slow("others of its kind are in make test")
def test_it_trains() -> None:
    """retrofit trains the caller's model to what one process trains it to."""

    @dw.distributed(nprocs=2, launcher="folder", retrofit=True, timeout=30)
    def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        for step in range(3):
            x = torch.tensor([[float(step + dw.rank() + 1), 1.0]])
            optimizer.zero_grad()
            (model(x) - 3).square().sum().backward()
            optimizer.step()
        return dw.world_size()

    model, alone = nn.Linear(2, 1), nn.Linear(2, 1)
    alone.load_state_dict(model.state_dict())
    assert fit(model, torch.optim.SGD(model.parameters(), lr=0.01)) == 2
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(3):
        x = torch.tensor([[float(step + 1), 1.0], [float(step + 2), 1.0]])
        optimizer.zero_grad()
        (alone(x) - 3).square().mean().backward()
        optimizer.step()
    assert torch.allclose(model.weight, alone.weight)


@pytest.mark.slow("ranks of a stranger")
def test_an_exception_in_its_own_type() -> None:
    """An exception of a rank is raised in the caller, with its type, rank and remote traceback."""

    @dw.distributed(nprocs=2, launcher="folder", timeout=30)
    def fails() -> None:
        if dw.rank() == 1:
            raise Mine("on purpose")
        dw.barrier()

    with pytest.raises(Mine, match="on purpose") as caught:
        fails()
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert "in fails" in str(caught.value.__cause__)


@pytest.mark.slow("ranks of a stranger")
def test_a_silent_death_is_named() -> None:
    """A rank that ends without a report is named."""

    @dw.distributed(nprocs=2, launcher="folder", timeout=30)
    def dies() -> None:
        if dw.rank() == 1:
            os.kill(os.getpid(), 9)
        dw.barrier()

    with pytest.raises(WorkerDiedError, match=r"rank 1 on .* died without raising an exception"):
        dies()


def test_its_refusal_comes_before_any_process(tmp_path: Path) -> None:
    """check() is asked first: nothing is started."""
    with pytest.raises(LaunchError, match="at most 4 ranks"):
        dw.distributed(nprocs=5, launcher="folder")(ranks)()
    assert not list(tmp_path.iterdir())


def test_what_it_cannot_is_refused() -> None:
    """A launcher that says nothing of restarts and several nodes is not asked for them."""
    with pytest.raises(OptionError, match="launcher='folder' is not made for restarts"):
        dw.distributed(nprocs=2, launcher="folder", max_restarts=1)(ranks)()


class Odd(FolderLauncher):
    """A launcher whose answers are what a test says, and that starts nothing."""

    def __init__(self, counted: object = 2, outcomes: object = ()) -> None:
        self._counted, self._outcomes = counted, outcomes

    def count(self, nprocs: object) -> Any:
        return self._counted

    def run(self, job: Job, plan: Assignment) -> Any:
        return self._outcomes


def odd(**answers: object) -> list[int]:
    """Return what a call by an odd launcher returns."""
    dw.register_launcher("folder", Odd, **answers)

    @dw.distributed(nprocs=2, launcher="folder", returns="all")
    def never() -> int:
        raise AssertionError("a rank was started")

    return never()


@pytest.mark.parametrize("counted", ["3", None, 0])
def test_a_count_that_is_no_number_of_ranks(counted: object) -> None:
    """What count() returns is checked before anything is made of it, by the launcher's name."""
    with pytest.raises(
        OptionError, match=rf"launcher='folder': count\(\)={counted!r}: it must be a whole number of at"
    ):
        odd(counted=counted)


def test_outcomes_are_checked() -> None:
    """All ranks' outcomes must be there, they are put into rank order, and one that failed is raised."""
    zero, one = (success(rank, transport.pack_result((rank, []), "")) for rank in (0, 1))
    assert odd(outcomes=[one, zero]) == [0, 1]
    message = r"launcher='folder': run\(\) must return the outcomes of the 2 ranks .* has returned "
    for outcomes, seen in (
        ([zero], "those of rank 0"),
        ([zero, zero], "those of rank 0"),
        ([], r"\[\]"),
        (None, "None"),
    ):
        with pytest.raises(LaunchError, match=message + seen):
            odd(outcomes=outcomes)
    with pytest.raises(Mine, match="on purpose"):
        odd(outcomes=[zero, failure(1, Mine("on purpose"))])


def test_elastic_does_not_replace_what_a_package_has_made() -> None:
    """Restarts are refused where torch elastic would start ranks without what the launcher adds."""

    class Careful(ForkLauncher):
        pass

    dw.register_launcher("folder", Careful)
    for options in ({"max_restarts": 1}, {"nnodes": "1:2", "rdzv_endpoint": "localhost"}):
        with pytest.raises(OptionError, match="launcher='folder' is not made for restarts"):
            dw.distributed(nprocs=2, launcher="folder", **options)(ranks)()  # type: ignore[call-overload]


def test_logs_that_nobody_would_write_are_refused(tmp_path: Path) -> None:
    """log_dir with a launcher that does not say that it writes logs is refused before any process starts."""
    with pytest.raises(OptionError, match="log_dir='logs', but launcher='folder' writes no such files"):
        dw.distributed(nprocs=2, log_dir="logs", launcher="folder")(ranks)()
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":  # a rank
    Path(sys.argv[1], f"pid.{sys.argv[2]}").write_text(str(os.getpid()))
    sys.exit(worker.work(FolderLink(Path(sys.argv[1]), int(sys.argv[2]))))
