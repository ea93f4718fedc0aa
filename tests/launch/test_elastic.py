"""Restarts by torch elastic: what the caller gets is what every launcher gives, and nothing stays behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distwrap import barrier, distributed, placement, rank, reduce
from distwrap.errors import ForkError, WorkerDiedError, WorkerTimeoutError
from distwrap.launch import elastic, worker
from tests.clusters import job
from tests.clusters.running import ended, started, wait_for_line
from tests.forked_commands import PYTHON
from tests.limits import SOON


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


@distributed(nprocs=2, max_restarts=1, timeout=30)
def work(kind: str, until: int = 1) -> tuple[int, float]:
    """Fail in some way as long as the attempt's number is below a limit; then add the ranks up."""
    barrier()
    if attempt() < until and rank() == 1:
        if kind == "raise":
            raise KeyError("boom", 3)
        if kind == "exit":
            raise SystemExit(7)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return attempt(), float(reduce(torch.tensor(rank() + 1.0), "sum"))


@pytest.mark.slow("starts ranks again after a failure")
def test_the_value_after_a_restart() -> None:
    """Whatever ended the first attempt, the value of the second comes home; other ends are in the tests below."""
    assert work("exit") == (1, 3.0)


def test_a_failure_is_reported_before_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's agent ends a rank when others end that have heard of its failure, so the report is there by then."""
    done: list[str] = []
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker.failures, "tell", lambda _: done.append("told"))
    monkeypatch.setattr(worker, "abandon_process_group", lambda **_: done.append("left"))
    link = SimpleNamespace(report=lambda _: done.append("reported"))
    with pytest.raises(worker.FailureReported):
        worker.report_failures(link, 0, lambda: {}["boom"])  # type: ignore[arg-type]
    assert done == ["reported", "told", "left"]


@pytest.mark.slow("starts ranks again after each failure")
def test_the_last_exception_comes_in_its_own_type() -> None:
    """With no restart left the caller has the exception, its arguments, rank and traceback."""
    with pytest.raises(KeyError) as caught:
        work("raise", 9)
    assert caught.value.args == ("boom", 3)
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert "in work" in str(caught.value.__cause__)


@pytest.mark.slow("starts ranks again after each failure")
def test_the_last_death_is_named() -> None:
    """A rank that was killed in the last attempt is told with its signal."""
    with pytest.raises(
        WorkerDiedError, match=r"rank 1 on .* died without raising an exception: killed by SIGKILL"
    ) as caught:
        work("die", 9)
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)


@pytest.mark.slow("starts ranks again after a failure")
def test_every_value(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """returns="all" is a list in rank order; of the restart a line says why."""
    monkeypatch.setenv("DISTWRAP_QUIET", "0")
    assert work.options(returns="all")("raise") == [(1, 3.0)] * 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert re.fullmatch(r"distwrap: restart 1 of at most 1: rank 1 on \S+ raised KeyError: \('boom', 3\)", line), line


def test_by_name() -> None:
    """launcher="elastic" without restarts is one attempt."""
    assert work.options(launcher="elastic", max_restarts=0)("") == (0, 3.0)
    with pytest.raises(KeyError):
        work.options(launcher="elastic", max_restarts=0)("raise")


@distributed(nprocs=2, max_restarts=1, retrofit=True, seed=0)
def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if attempt() == 0 and rank() == 0:
        raise RuntimeError("again, please")
    (model(torch.ones(1, 2)) - 3).square().sum().backward()
    optimizer.step()
    return placement().world_size


@pytest.mark.slow("starts ranks again after each failure")
def test_the_callers_model_is_trained() -> None:
    """retrofit writes home what the last attempt has trained, from where the caller's model was."""
    model = nn.Linear(2, 1)
    expected = nn.Linear(2, 1)
    expected.load_state_dict(model.state_dict())
    (expected(torch.ones(1, 2)) - 3).square().sum().backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert fit(model, torch.optim.SGD(model.parameters(), lr=0.1)) == 2
    assert torch.allclose(model.weight, expected.weight)


@distributed(nprocs=2, max_restarts=0, launcher="elastic", timeout=2)
def stand_still() -> None:
    threading.Event().wait(60)


@pytest.mark.slow("waits for a time-out, and starts again")
def test_a_stall_is_reported() -> None:
    """Ranks that wait for what does not come end with the place of each."""
    with pytest.raises(WorkerTimeoutError, match=r"(?s)no rank has moved for 2 s:.*ranks 0, 1 .*test_elastic\.py"):
        stand_still()


@pytest.mark.slow("starts ranks again after each failure")
def test_the_caller_is_as_it_was() -> None:
    """Variables, signal handlers and log levels that torch's agent changes are given back, also after a failure."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    environ, level = dict(os.environ), logging.getLogger("torch.distributed.elastic.agent.server.api").level
    work("")
    with pytest.raises(KeyError):
        work("raise", 9)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)] == handlers
    assert dict(os.environ) == environ
    assert logging.getLogger("torch.distributed.elastic.agent.server.api").level == level


@pytest.mark.slow("starts ranks again after each failure")
def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ours nor torch's, and what a killed caller has left is removed by the next."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "distwrap-restarts-x").mkdir()
    assert work("die") == (1, 3.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("others of its kind are in make test")
def test_a_rank_that_is_ended_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's agent may end a rank before our worker has begun there, and leaves no file then either."""

    def begin_late(*_: object) -> None:
        if os.environ["RANK"] == "0":
            time.sleep(60)
        os._exit(3)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(elastic, "rank_main", begin_late)
    with pytest.raises(WorkerDiedError, match=r"rank 1 on .* exit code 3"):
        work.options(max_restarts=0, launcher="elastic")("")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("others of its kind are in make test")
def test_a_folder_of_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is none of ours under a lock is left alone, and is no reason to fail."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = [tmp_path / f"distwrap-elastic-{number}-x" for number in ("\N{SUPERSCRIPT TWO}", "")]
    for folder in theirs:
        folder.mkdir()
    work("")
    assert sorted(tmp_path.iterdir()) == sorted(theirs)


def test_fork_where_it_is_not_safe() -> None:
    """launcher="fork" is refused with a thread around, as without restarts; auto spawns then."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="somebodys")
    thread.start()
    try:
        with pytest.raises(ForkError, match="not safe here"):
            work.options(launcher="fork")("")
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow("a program, whose ranks are ended")
def test_a_signal_ends_the_ranks_too() -> None:
    """SIGTERM to the caller leaves no rank."""
    env = {"DISTWRAP_NPROCS": "2", "DISTWRAP_MAX_RESTARTS": "1", "JOB_SLOW": "0.3"}
    with started([PYTHON, job.__file__, "60"], **env) as process:
        wait_for_line(process, '"epoch": 1')
        process.send_signal(signal.SIGTERM)
        left = ended(process, SOON)
    assert left.code == 128 + signal.SIGTERM, left.output
