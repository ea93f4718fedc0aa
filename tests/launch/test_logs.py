"""`log_dir`: what each rank prints, in files besides the console."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import distwrap as dw
from distwrap import distributed
from distwrap.errors import OptionError, WorkerDiedError
from tests.forked_commands import PYTHON, forked_commands
from tests.interpreters import run_python
from tests.limits import SOON
from tests.slow import slow

LIMIT = 60.0
ROOT = Path(__file__).parents[2]
LAUNCHERS = ["fork", slow("forkserver", why="[fork] shows it"), slow("spawn", why="[fork] shows it")]


def _talk(lines: int) -> None:
    rank = dw.rank()
    for number in range(lines):
        print(f"rank {rank} line {number}")
    print(f"rank {rank} complains", file=sys.stderr)
    os.write(1, f"rank {rank} natively\n".encode())
    subprocess.run(["echo", f"what rank {rank} started"], check=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_files_and_console(launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each rank's lines are in its files in order and on the console whole, also those it did not print by Python."""
    folder = tmp_path / "made" / "for it"
    distributed(nprocs=2, launcher=launcher, log_dir=folder)(_talk)(2000)
    captured = capfd.readouterr()
    expected = {}
    for rank in range(2):
        lines = [f"rank {rank} line {number}" for number in range(2000)]
        expected[rank] = [*lines, f"rank {rank} natively", f"what rank {rank} started"]
        assert (folder / f"rank_{rank}.stdout.log").read_text().splitlines() == expected[rank]
        assert (folder / f"rank_{rank}.stderr.log").read_text() == f"rank {rank} complains\n"
        assert [line for line in captured.out.splitlines() if f"rank {rank} " in line] == [
            line for line in expected[rank] if f"rank {rank} " in line
        ]
    assert len(captured.out.splitlines()) == sum(map(len, expected.values()))
    assert sorted(captured.err.splitlines()) == ["rank 0 complains", "rank 1 complains"]


def _talk_twice(marks: Path) -> None:
    """Fail at the first attempt of rank 1."""
    print("attempt of rank", dw.rank())
    dw.barrier()
    if dw.rank() == 1 and not (marks / "failed").exists():
        (marks / "failed").touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dw.barrier()
    os.write(2, b"done\n")


@pytest.mark.slow("waits for a writer to end")
def test_under_elastic(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What ranks print that start again after a crash is in their files, of all attempts, and on the console."""
    folder = tmp_path / "logs"
    distributed(nprocs=2, launcher="fork", max_restarts=1, log_dir=folder)(_talk_twice)(tmp_path)
    captured = capfd.readouterr()
    for rank in range(2):
        said = (folder / f"rank_{rank}.stdout.log").read_text()
        assert said == f"attempt of rank {rank}\n" * 2
        assert captured.out.count(f"attempt of rank {rank}\n") == 2
        assert (folder / f"rank_{rank}.stderr.log").read_text().endswith("done\n")
    assert "in _talk_twice" in (folder / "rank_1.stderr.log").read_text()
    assert captured.err.count("done\n") == 2


ONE = """
import os
import distwrap as dw

@dw.distributed(nprocs=1, log_dir="logs")
def main():
    print("rank", dw.rank())
    os.write(2, b"natively\\n")
    raise SystemExit(3)

if __name__ == "__main__":
    print("before")
    main()
"""


@pytest.mark.slow("waits for a writer to end")
def test_in_one_process(tmp_path: Path) -> None:
    """A call in the caller's own process has its files too, however it ends."""
    (tmp_path / "program.py").write_text(ONE)
    done = run_python("program.py", cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 3
    assert (tmp_path / "logs" / "rank_0.stdout.log").read_text() == "rank 0\n"
    assert (tmp_path / "logs" / "rank_0.stderr.log").read_text() == "natively\n"
    assert (done.stdout, done.stderr) == ("before\nrank 0\n", "natively\n")


def test_prints_that_take_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Python's prints of this process do not go through its own output, as in a notebook, that is said."""
    distributed(nprocs=1, log_dir=tmp_path)(_talk)(1)
    assert "as in a notebook, so what Python prints is not written to log_dir" in capsys.readouterr().err


def _crash() -> None:
    print("the last words of rank", dw.rank())
    if dw.rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dw.barrier()


def test_last_words(tmp_path: Path) -> None:
    """What a rank said before it crashed is kept, and so is its stack."""
    with pytest.raises(WorkerDiedError, match=r"rank 1 .*SIGSEGV"):
        distributed(nprocs=2, launcher="forkserver", log_dir=tmp_path)(_crash)()
    assert (tmp_path / "rank_1.stdout.log").read_text() == "the last words of rank 1\n"
    assert "in _crash" in (tmp_path / "rank_1.stderr.log").read_text()


def test_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A disk that fills up costs the file, and a line that says so, but not the run."""
    (tmp_path / "rank_1.stdout.log").symlink_to("/dev/full")
    distributed(nprocs=2, launcher="fork", log_dir=tmp_path)(_talk)(10)
    captured = capfd.readouterr()
    assert captured.err.count("rank_1.stdout.log is not complete: [Errno 28]") == 1
    assert captured.out.count("rank 1 line") == 10
    assert (tmp_path / "rank_0.stdout.log").read_text().count("line") == 10


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A folder that cannot be written is refused before any process starts."""
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"log_dir=.* cannot be written: .*file"):
        distributed(nprocs=2, launcher="fork", log_dir=tmp_path / "file" / "logs")(_talk)(1)
    with pytest.raises(OptionError, match="log_dir=3: it must be None or the path of a folder"):
        distributed(log_dir=3)  # type: ignore[call-overload]


def _progress() -> None:
    os.write(2, b"\r 50 %")
    while not Path("seen").exists():
        time.sleep(0.05)
    os.write(2, b"\r100 %\n")


@pytest.mark.slow("a program")
def test_a_progress_bar(tmp_path: Path) -> None:
    """The beginning of a line whose end does not come is on the console in a moment."""
    program = tmp_path / "program.py"
    program.write_text(
        "import distwrap as dw\nfrom tests.launch.test_logs import _progress\n"
        "if __name__ == '__main__': dw.distributed(nprocs=2, launcher='fork', log_dir='logs')(_progress)()\n"
    )
    run = subprocess.Popen(
        [PYTHON, program],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DISTWRAP_QUIET": "1"},
    )
    try:
        assert run.stderr is not None
        first = os.read(run.stderr.fileno(), 100)
        (tmp_path / "seen").touch()
        rest = run.communicate(timeout=LIMIT)[1]
        assert first.startswith(b"\r 50 %")
        assert b"100" not in first
        assert rest.count(b"\r100 %\n") == 2
    finally:
        run.kill()
        run.communicate()


@pytest.mark.slow("waits for a writer to end")
def test_what_holds_on(tmp_path: Path) -> None:
    """A process that a rank leaves behind with its output open does not keep the call waiting."""
    code = (
        "import distwrap as dw; from tests.launch.test_logs import _leave_one_behind\n"
        "dw.distributed(nprocs=2, launcher='fork', log_dir='.')(_leave_one_behind)()\n"
    )
    run_python("-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=SOON)
    os.kill(int((tmp_path / "rank_0.stdout.log").read_text()), signal.SIGKILL)  # it is still there


def _leave_one_behind() -> None:
    if dw.rank() == 0:
        print(subprocess.Popen(["sleep", "100"], start_new_session=True).pid, flush=True)


SCRIPT = """
import distwrap as dw

@dw.distributed(nprocs=2, launcher="script", log_dir="logs")
def main(call):
    print("rank", dw.rank(), "call", call)

if __name__ == "__main__":
    print("before")
    main(1)
    main(2)
    print("after")
"""


@pytest.mark.slow("a program")
def test_script(tmp_path: Path) -> None:
    """Under the script launcher rank 0 is the caller: what it prints during the calls is in its file."""
    (tmp_path / "program.py").write_text(SCRIPT)
    done = run_python("program.py", cwd=tmp_path, timeout=LIMIT, check=True)
    assert (tmp_path / "logs" / "rank_0.stdout.log").read_text() == "rank 0 call 1\nrank 0 call 2\n"
    assert (tmp_path / "logs" / "rank_1.stdout.log").read_text() == "before\nrank 1 call 1\nrank 1 call 2\n"
    ours = [line for line in done.stdout.splitlines() if "rank 1" not in line]
    assert sorted(ours) == ["after", "before", "before", "rank 0 call 1", "rank 0 call 2"]


@pytest.mark.slow("a program under torchrun")
def test_under_torchrun(tmp_path: Path) -> None:
    """Under an outer launcher its own options hold the output, and rank 0 says so."""
    (tmp_path / "program.py").write_text(SCRIPT.replace('"script"', '"auto"'))
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"),
        cwd=tmp_path,
        env={**os.environ, **forked_commands(), "DISTWRAP_QUIET": "0"},
        check=True,
        timeout=LIMIT,
    )
    assert "log_dir='logs' is left to torchrun, which holds the output: torchrun has --log-dir" in done.stderr
    assert not (tmp_path / "logs").exists()
