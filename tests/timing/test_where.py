"""Where the ranks of a run are, as another process reads it: the command `where`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest

import distwrap as dw
from distwrap.cli import main, where
from distwrap.errors import WorkerError
from distwrap.group.world import current_world
from distwrap.network import memory_file
from distwrap.network.waiting import wait_until
from distwrap.supervision.locations import LEFT
from distwrap.supervision.runs import NAME, Run, Shown, runs
from distwrap.supervision.shared_status import BOARD, SharedStatus
from distwrap.testing import run_ranks
from tests.slow import INTERPRETERS, nightly

SHOWN = Shown(0, ["backward", "a.py:3", 12, ""], 98.0)


def own_run() -> Run:
    """Return the run whose rank this process is."""
    found = wait_until(lambda: next((each for each in runs() if os.getpid() in each.processes), None), 20)
    assert found is not None
    return found


def asked(pid: int) -> str:
    with redirect_stdout(StringIO()) as said:
        assert main(["where", str(pid)]) == 0
    return said.getvalue()


def look_from_rank_zero(*pids: int) -> list[str]:
    """Let the other rank wait here; return where it is, by SIGQUIT's way, and by the command for several processes."""
    if dw.rank() == 1:
        dw.barrier()
        return []

    def waits() -> bool:
        location = next((shown.location for shown in own_run().shown if shown.rank == 1), None)
        return location is not None and location[0] == "barrier"

    assert wait_until(waits, 20)
    channel = current_world().channel
    assert channel is not None
    found = [channel.reporter.ask_all(), *(asked(pid) for pid in (os.getpid(), *pids))]
    dw.barrier()
    return found


def test_where_a_rank_is() -> None:
    """SIGQUIT and the command say the same, by the process of a rank, of its caller, and of a shell above that."""
    first, *others = run_ranks(look_from_rank_zero, 2, os.getpid(), os.getppid(), timeout=60)[0]
    rank_one = first.splitlines()[-1]
    assert "rank 1 in barrier at test_where.py:" in rank_one
    assert all(rank_one in text.splitlines() for text in others)  # beside other tests' runs of the same caller


def leave_early(path: Path) -> None:
    """Let one rank leave by itself; write what the other sees then."""
    if dw.rank() == 1:
        sys.exit(0)
    if wait_until(lambda: len((run := own_run()).shown) == 2 and run.shown[1].location is None, 20):
        path.write_text(asked(os.getpid()))


def test_a_rank_that_has_left(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1 left"):
        run_ranks(leave_early, 2, tmp_path / "said", timeout=60)
    assert f"rank 1 {LEFT}" in (tmp_path / "said").read_text()


def look_for_caller(caller: int) -> int:
    """Wait until both ranks have shown themselves; return how many they are, by their caller's number."""
    found = wait_until(lambda: [each for each in runs() if caller in each.processes and len(each.shown) == 2], 30)
    dw.barrier()
    return len(found)


@pytest.mark.parametrize("launcher", ["elastic", nightly("spawn", row="products", why="test_where_a_rank_is")])
@pytest.mark.slow(INTERPRETERS)
def test_launchers(launcher: str) -> None:
    """Whichever way the ranks are started, they are found by the process that has called them."""
    assert dw.distributed(nprocs=2, launcher=launcher, timeout=60)(look_for_caller)(os.getpid()) == 1


@pytest.mark.skipif(not memory_file.ARE_POSSIBLE, reason="there are no boards")
@pytest.mark.parametrize("whose", ["own", "another version's", "another user's"])
def test_boards_of_others(whose: str) -> None:
    """What another version of the package shows, or another user, is no run of ours, also for root."""
    if whose == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    fd = memory_file.make(f"{BOARD}-test")
    board = SharedStatus(fd, 1, texts=True)
    board.write(0, {NAME: {"rank": 0, "host": "here"} if whose == "another version's" else asdict(SHOWN)})
    if whose == "another user's":
        os.fchown(fd, 12345, -1)
    found = [each.shown for each in runs() if each.holder == os.getpid() and SHOWN in each.shown]
    os.close(fd)
    assert found == ([[SHOWN]] if whose == "own" else [])


def test_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that has nothing to do with a run, and one that is none."""
    with subprocess.Popen(["sleep", "60"]) as other:
        pid = str(other.pid)
        assert main(["where", pid]) == 1
        told = capsys.readouterr().err
        assert f"process {pid} belongs to no run of yours on this node, or the run has not started yet. " in told
        other.kill()
    assert main(["where", pid]) == 1
    assert f"there is no process {pid} on this node." in capsys.readouterr().err


def run_of(shown: Shown, ranks: int) -> Run:
    return Run(5, {5}, [shown], ranks)


def test_ranks_on_other_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A node shows its own ranks, and says which there are besides."""
    monkeypatch.setattr(where, "runs", lambda: [run_of(replace(SHOWN, time=time.time()), ranks=4)])
    assert main(["where"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run of process 5:",
        "  rank 0 in backward at a.py:3, step 12",
        "  ranks 1-3 are on another node, or not started yet",
    ]


def test_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As SIGQUIT says it."""
    monkeypatch.setattr(where, "runs", lambda: [run_of(replace(SHOWN, time=time.time() - 20), ranks=1)])
    assert main(["where"]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith(
        "  rank 0 does not answer: native code holds the interpreter, or it is gone; 20 s ago it was"
    )


@pytest.mark.parametrize("words", [["top"], ["top", "12345", "--once"]])
def test_a_command_that_is_gone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The table of ranks that refreshed itself; what to use instead is said."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "distwrap where" in capsys.readouterr().err
