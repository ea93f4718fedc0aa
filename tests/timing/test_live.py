"""What a run shows of itself to another process: `top` and `where`."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import distwrap as dw
from distwrap.cli import main, top
from distwrap.errors import WorkerError
from distwrap.group.world import current_world
from distwrap.network import memory_file
from distwrap.network.waiting import wait_until
from distwrap.supervision.board import BOARD, Board
from distwrap.supervision.locations import LEFT
from distwrap.supervision.runs import Run, runs
from distwrap.supervision.shown import NAME, Shown
from distwrap.testing import run_ranks
from tests.slow import INTERPRETERS

ROOT = Path(__file__).parents[2]

SCRIPT = """
import time
import torch
import distwrap as dw
from torch import nn

def train():
    model = dw.wrap_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(100_000, 4, 4, generator=dw.rank_generator(0))
    bar = dw.progress(batches)
    for x in bar:
        if dw.is_rank_zero():
            bar.set_postfix(loss=0.5)
        if dw.rank() == 1:
            time.sleep(0.02)  # the slow one
        model(x).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    dw.distributed(nprocs=2, timeout=60)(train)()
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that has started a run of two ranks."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} train.py & wait"],
        env=environment,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


@pytest.fixture
def run(script: subprocess.Popen[bytes]) -> Run:
    """The run, of which both ranks have shown themselves."""

    def found() -> Run | None:
        here = [each for each in runs() if script.pid in each.processes and len(each.figures) == 2]
        return here[0] if here and all((shown.step or 0) > 5 for shown in here[0].figures) else None

    return wait_until(found, 60, longest_pause=0.2)  # type: ignore[return-value]


@pytest.mark.slow("measures loops of some seconds")
def test_where_the_ranks_are(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """By the caller's process, by a rank's, by a shell's, or all runs; the table has a line for each rank."""
    first, second = sorted(run.figures, key=lambda shown: shown.rank)
    assert first.pid != second.pid
    assert run.holder not in (first.pid, second.pid)
    for pid in (run.holder, second.pid, os.getpid()):
        assert main(["where", str(pid)]) == 0
        said = capsys.readouterr().out
        assert f"run of process {run.holder}:" in said
        assert " at train.py:" in said
    assert main(["top", str(run.holder), "--once"]) == 0
    _, columns, *ranks = capsys.readouterr().out.splitlines()
    assert "loss=0.5" in ranks[0]
    assert columns.split()[:5] == ["rank", "pid", "host", "device", "step"]
    assert [line.split()[:2] for line in ranks] == [["0", str(first.pid)], ["1", str(second.pid)]]


@pytest.mark.slow(INTERPRETERS)
def test_ends_of_the_command(run: Run) -> None:
    """Ctrl-C ends the tables quietly, and so does a reader that has enough; without a terminal no code is written."""
    command = [sys.executable, "-m", "distwrap", "top", str(run.holder), "--seconds", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(6)]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0
    assert lines[0] == lines[4] == f"run of process {run.holder}\n"
    assert "\x1b" not in "".join(lines)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def own_run() -> Run:
    """Return the run whose rank this process is."""
    found = wait_until(lambda: next((each for each in runs() if os.getpid() in each.processes), None), 20)
    assert found is not None
    return found


def train_slowly(steps: int, pace: float) -> tuple[list[Shown], int]:
    """Train with a rank that computes for a while each step, and evaluate; return the figures in the end, and where."""
    model = dw.wrap_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun = time.monotonic()
    batches = dw.shard_loader(DataLoader(torch.randn(8000, 4), batch_size=2))  # type: ignore[arg-type]
    for step, x in enumerate(batches, 1):
        while dw.rank() == 1 and time.monotonic() < begun + step * pace:
            pass
        model(x).square().mean().backward()
        optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():
                for held_out in dw.shard_loader(DataLoader(torch.randn(40, 4), batch_size=2)):  # type: ignore[arg-type]
                    model(held_out)
        if step == steps:
            time.sleep(1.5)  # until both have shown themselves once more
            dw.barrier()
            figures = own_run().figures
            dw.barrier()  # a rank that has left is nowhere
            return figures, step
    raise AssertionError("there are more steps")


@pytest.mark.slow("measures loops of some seconds")
def test_figures_of_a_known_loop() -> None:
    """The speed is that of the slow rank, for which the other waits; after an evaluation the step is the loop's."""
    figures, step = run_ranks(train_slowly, 2, 43, 0.1, timeout=60)[0]
    waiting, busy = figures
    assert all(3 < shown.speed < 10.5 for shown in figures), figures
    assert (waiting.idle or 0) > 0.5 > (busy.idle or 1), figures
    assert [shown.step for shown in figures] == [step, step]
    assert [shown.location[2] for shown in figures if shown.location] == [step, step]


def look_from_rank_zero() -> list[str]:
    """Let the other rank wait here; return where it is, by SIGQUIT's way and by the command's."""
    dw.barrier()
    if dw.rank() == 1:
        time.sleep(4)  # it has shown itself here by then
        return []
    time.sleep(2)
    channel = current_world().channel
    assert channel is not None
    with redirect_stdout(io.StringIO()) as said:
        main(["where", str(os.getpid())])
    return [text.splitlines()[-1] for text in (channel.reporter.ask_all(), said.getvalue())]


@pytest.mark.slow("measures loops of some seconds")
def test_both_ways_say_the_same() -> None:
    """SIGQUIT asks the ranks, and the command reads what they show."""
    asked, shown = run_ranks(look_from_rank_zero, 2, timeout=60)[0]
    assert "  rank 1 in look_from_rank_zero at test_live.py:" in asked
    assert asked == shown


def leave_early(path: Path) -> None:
    """Let one rank leave by itself; write what the other sees then."""
    if dw.rank() == 1:
        sys.exit(0)
    if wait_until(lambda: len((run := own_run()).figures) == 2 and run.figures[1].location is None, 20):
        path.write_text(top.table(own_run(), time.time()))


def test_a_rank_that_has_left(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1 left leave_early"):
        run_ranks(leave_early, 2, tmp_path / "table", timeout=60)
    assert (tmp_path / "table").read_text().endswith(f"  {LEFT}")


def look_for_caller(caller: int) -> int:
    """Wait until both ranks have shown themselves; return how many they are, by their caller's number."""
    found = wait_until(lambda: [each for each in runs() if caller in each.processes and len(each.figures) == 2], 30)
    dw.barrier()
    return len(found)


@pytest.mark.slow(INTERPRETERS)
@pytest.mark.parametrize("launcher", ["elastic", "spawn"])
def test_launchers(launcher: str) -> None:
    """Whichever way the ranks are started, they are found by the process that has called them."""
    assert dw.distributed(nprocs=2, launcher=launcher, timeout=60)(look_for_caller)(os.getpid()) == 1


SHOWN = Shown(0, 7, "a", "cuda:0", 12, 3.14, 0.25, ["backward", "a.py:3", 12, ""], 10**9, 2 * 10**9, "", 98.0)


@pytest.mark.skipif(not memory_file.ARE_POSSIBLE, reason="there are no boards")
@pytest.mark.parametrize("whose", ["own", "another version's", "another user's"])
def test_boards_of_others(whose: str) -> None:
    """What another version of the package shows, or another user, is no run of ours, also for root."""
    if whose == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    fd = memory_file.make(f"{BOARD}-test")
    board = Board(fd, 1, texts=True)
    board.write(0, {NAME: {"rank": 0, "where": "here"} if whose == "another version's" else asdict(SHOWN)})
    if whose == "another user's":
        os.fchown(fd, 12345, -1)
    found = [each.figures for each in runs() if each.holder == os.getpid() and SHOWN in each.figures]
    os.close(fd)
    assert found == ([[SHOWN]] if whose == "own" else [])


def test_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that has nothing to do with a run, one that is none, and no sense at all."""
    with subprocess.Popen(["sleep", "60"]) as other:
        pid = str(other.pid)
        assert main(["top", pid, "--once"]) == 1
        told = capsys.readouterr().err
        assert f"process {pid} belongs to no run of yours on this node, or the run has not started yet. " in told
        other.kill()
    assert main(["where", pid]) == 1
    assert f"there is no process {pid} on this node." in capsys.readouterr().err
    assert main(["top", pid, "--seconds", "0"]) == 2
    assert "--seconds" in capsys.readouterr().err


def run_of(*figures: Shown, ranks: int = 2) -> Run:
    return Run(5, {5}, list(figures), ranks)


def test_the_table() -> None:
    waits = replace(
        SHOWN, rank=0, step=None, speed=0.0333, idle=1.0, location=["", "a.py:4", None, ""], bar="loss=0.5", time=90.0
    )
    head, _, first, second = top.table(run_of(replace(SHOWN, rank=1), waits), now=100.0).splitlines()
    assert head == "run of process 5"
    assert " ".join(first.split()) == "0 7 a cuda:0 - 0.033 100 % 2.0 GB + 1.0 GB loss=0.5 at a.py:4, 10 s ago"
    assert " ".join(second.split()) == "1 7 a cuda:0 12 3.1 25 % 2.0 GB + 1.0 GB in backward at a.py:3"


def test_ranks_on_other_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A node shows its own ranks, and says which there are besides."""
    words = "ranks 1-3 are on another node, or not started yet"
    assert top.table(run_of(SHOWN, ranks=4), now=100.0).splitlines()[-1] == words
    monkeypatch.setattr(top, "runs", lambda: [run_of(replace(SHOWN, time=time.time()), ranks=4)])
    assert main(["where"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  rank 0 in backward at a.py:3, step 12", f"  {words}"]


def test_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As SIGQUIT says it."""
    monkeypatch.setattr(top, "runs", lambda: [run_of(replace(SHOWN, time=time.time() - 20), ranks=1)])
    assert main(["where"]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith(
        "  rank 0 does not answer: native code holds the interpreter, or it is gone; 20 s ago it was"
    )


def test_a_small_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "5")
    lines = top.fitting("\n".join([f"{number} and so on, beyond the edge" for number in range(9)])).splitlines()
    assert lines == ["0 and so on, beyond…", "1 and so on, beyond…", "2 and so on, beyond…", "and 6 more lines"]
