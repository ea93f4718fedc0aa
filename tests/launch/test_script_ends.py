"""launcher="script": how a run ends, when rank 0 is the caller and may sit in native code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distwrap.launch.script_rank_zero import RankZero, _AnotherFailed
from tests.interpreters import run_python
from tests.limits import SOON
from tests.slow import INTERPRETERS, slow

LIMIT = 90.0

PROGRAM = """
import atexit, os, queue, signal, sys, time
import distwrap as dw

def say(*words):  # in one piece
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

@dw.distributed(nprocs=2, launcher="script", timeout=100)
def main(what):
    rank = dw.rank()
    say("rank", rank, os.getpid())
    dw.barrier()
    if what.startswith("zero fails") and rank == 0:
        if what.endswith("again"):  # as torch's handler does wherever the main thread is
            from distwrap.data import workers
            keep_away = workers.news_kept_away
            def comes_before():
                workers.news_kept_away = keep_away
                raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
            workers.news_kept_away = comes_before
        raise ValueError("the first cause")
    if what.startswith("one fails") and rank == 1:
        time.sleep(0.5)
        raise ValueError("the first cause")
    if what == "one fails, zero sleeps":
        time.sleep(100)
    if what == "one is killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "zero in a collective" and rank == 1:
        time.sleep(100)
    if what == "one in a collective" and rank == 0:
        try:
            time.sleep(100)
        finally:
            say("clean-up of rank 0")
    if what == "exits":
        sys.exit(5)
    dw.barrier()
    dw.barrier()
    return what

if __name__ == "__main__":
    what = sys.argv[1]
    if "PATIENT" in os.environ:
        import distwrap.launch.script_rank_zero as script
        script.INTERRUPT_SECONDS = 1000.0
    if "LATE" in os.environ:
        kill = signal.pthread_kill
        def late(*words):
            time.sleep(float(os.environ["LATE"]))
            kill(*words)
        signal.pthread_kill = late
    if what == "zero in a collective" and "AGAIN" in os.environ:
        main("")
    if what == "fails midway":
        import distwrap.launch.parked_ranks as script
        start = script._start
        def fails_midway(rank, *rest):
            if rank == 2:
                raise OSError("no more processes")
            process = start(rank, *rest)
            say("started", process.pid)
            return process
        script._start = fails_midway
        main.options(nprocs=3)(what)
    if what == "exits between":
        main("")
        if dw.is_rank_zero():
            atexit.register(say, "the exit handler of rank 0")
        sys.exit(0)
    result = main(what)
    say("result", result)
"""


class Run:
    """The program, under way."""

    def __init__(self, folder: Path, what: str, *, ranks: int = 2) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, program, what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
        assert self.process.stdout is not None
        self.pids = [int(self.process.stdout.readline().split()[-1]) for _ in range(ranks)]
        self.began = time.monotonic()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *args: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ended(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, output and errors, and see that no rank is left."""
        output, errors = self.process.communicate(timeout=LIMIT)
        assert time.monotonic() - self.began < SOON
        deadline = time.monotonic() + SOON
        while [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self.process.returncode, output, errors


@pytest.mark.parametrize(
    ("what", "words"),
    [
        slow("zero fails", "ValueError: the first cause", why=INTERPRETERS),
        slow("zero fails, a loader's worker again", r"ValueError: the first cause\s*$", why=INTERPRETERS),
        ("one fails, zero waits", "rank 1 on .* raised:(?s:.*)\n.*ValueError: the first cause"),
        slow("one fails, zero sleeps", "rank 1 on .* raised:(?s:.*)\n.*ValueError: the first cause", why=INTERPRETERS),
        slow("one is killed", "WorkerDiedError: rank 1 on .* killed by SIGKILL", why=INTERPRETERS),
    ],
)
@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_a_failure(what: str, words: str, tmp_path: Path) -> None:
    """A failure of either rank ends the script with its exception, whatever the other one is doing."""
    with Run(tmp_path, what) as run:
        code, output, errors = run.ended()
    assert code == 1
    assert re.search(words, errors), errors
    assert "result" not in output


def test_the_interrupt_comes_in_the_function_alone() -> None:
    """One that comes before it, or is handled when it is over, is none; the supervisor sends it again."""
    zero = RankZero()

    def work() -> None:
        with zero.working():
            zero.signal(signal.SIGTERM)
            time.sleep(SOON)

    with zero.hear_of_failures():
        zero.signal(signal.SIGTERM)
        with pytest.raises(_AnotherFailed):
            work()
        signal.raise_signal(zero._SIGNAL)


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_the_interrupt_after_a_failure_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What wakes rank 0 after another's failure is no Ctrl-C, though the failure had woken rank 0 by then."""
    monkeypatch.setenv("LATE", "0.1")
    with Run(tmp_path, "one fails, zero waits") as run:
        code, _, errors = run.ended()
    assert code == 1, errors
    assert re.search("rank 1 on .* raised:(?s:.*)\n.*ValueError: the first cause", errors), errors


@pytest.mark.parametrize("what", [slow("zero in a collective", why=INTERPRETERS), "one in a collective"])
@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_ctrl_c(what: str, tmp_path: Path) -> None:
    """A Ctrl-C ends the run within seconds, also where rank 0 waits in native code."""
    with Run(tmp_path, what) as run:
        time.sleep(0.5)
        os.killpg(run.process.pid, signal.SIGINT)
        code, output, errors = run.ended()
    assert code == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert ("clean-up of rank 0" in output) == (what == "one in a collective")


@pytest.mark.slow(INTERPRETERS)
def test_a_second_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C does not wait for what the first one waits for, here very long."""
    monkeypatch.setenv("PATIENT", "1")
    with Run(tmp_path, "zero in a collective") as run:
        time.sleep(0.5)
        os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(0.3)
        os.killpg(run.process.pid, signal.SIGINT)
        code, _, errors = run.ended()
    assert code == -signal.SIGINT, errors


@pytest.mark.slow(INTERPRETERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_caller_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """When a signal ends rank 0, the others end with it."""
    with Run(tmp_path, "zero in a collective") as run:
        run.process.send_signal(number)
        assert run.ended()[0] == -number


@pytest.mark.slow(INTERPRETERS)
@pytest.mark.parametrize("calls", [1, 2])
def test_where_are_they(calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGQUIT prints where the ranks are, though rank 0 is in native code; also in a later call."""
    if calls > 1:
        monkeypatch.setenv("AGAIN", "1")
    with Run(tmp_path, "zero in a collective", ranks=2 * calls) as run:
        time.sleep(0.5)
        run.process.send_signal(signal.SIGQUIT)
        assert run.process.stderr is not None
        lines = []
        for line in run.process.stderr:
            lines.append(line)
            if "rank 1" in line:
                break
    assert re.search(r"where the ranks are:\n  rank 0 in barrier at program\.py:\d+\n  rank 1 in main", "".join(lines))


@pytest.mark.slow(INTERPRETERS)
def test_sys_exit(tmp_path: Path) -> None:
    """`sys.exit` in the function is the script's exit code."""
    with Run(tmp_path, "exits") as run:
        assert run.ended()[0] == 5


@pytest.mark.slow(INTERPRETERS)
def test_exit_between_calls(tmp_path: Path) -> None:
    """A script that exits after its last call takes the parked ranks along, and exit handlers run."""
    with Run(tmp_path, "exits between") as run:
        code, output, errors = run.ended()
    assert (code, errors.count("Traceback")) == (0, 0), errors
    assert output.count("the exit handler of rank 0") == 1


@pytest.mark.slow(INTERPRETERS)
def test_a_start_that_fails_midway(tmp_path: Path) -> None:
    """When a rank cannot be started, those before it are ended."""
    with Run(tmp_path, "fails midway", ranks=1) as run:
        code, _, errors = run.ended()
    assert code == 1
    assert "OSError: no more processes" in errors


@pytest.mark.parametrize("how", ["return", slow("sys.exit(0)", why=INTERPRETERS)])
@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_a_rank_that_leaves_early(how: str, tmp_path: Path) -> None:
    """A rank that returns or exits cleanly before the others is named by rank 0, which waits for it."""
    program = tmp_path / "leaves.py"
    program.write_text(
        "import sys, distwrap as dw\n"
        "def main():\n"
        "    dw.barrier()\n"
        f"    if dw.rank() == 1: {how}\n"
        "    dw.barrier()\n"
        "dw.distributed(nprocs=2, launcher='script')(main)()\n"
    )
    done = run_python(program, timeout=LIMIT)
    assert done.returncode == 1
    assert re.search("CollectiveError: rank 0 on .* waited in a collective for rank 1, which had left", done.stderr)


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_a_signal_of_another_program_is_no_failure(tmp_path: Path) -> None:
    """What wakes rank 0 is sent by others too: Go's runtime sends it to its own process."""
    program = tmp_path / "urgent.py"
    program.write_text(
        "import signal, distwrap as dw\n"
        "def main():\n"
        "    if dw.rank() == 0: signal.raise_signal(signal.SIGURG)\n"
        "    return dw.reduce(1, 'sum')\n"
        "print(dw.distributed(nprocs=2, launcher='script')(main)())\n"
    )
    done = run_python(program, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


SWALLOWS = """
import time
import distwrap as dw

class Swallows:
    def __del__(self):  # what is raised here is printed, and ignored
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

@dw.distributed(nprocs=2, launcher="script", timeout=100)
def main():
    dw.barrier()
    if dw.rank() == 1:
        time.sleep(0.2)
        raise ValueError("the first cause")
    Swallows()
    time.sleep(100)

main()
"""


@pytest.mark.slow(INTERPRETERS)
def test_an_interruption_that_python_ignores(tmp_path: Path) -> None:
    """The news of another's failure may come where Python ignores exceptions: it comes again then."""
    program = tmp_path / "swallows.py"
    program.write_text(SWALLOWS)
    start = time.monotonic()
    done = run_python(program, timeout=LIMIT)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the first cause"), done.stderr
    assert time.monotonic() - start < SOON


LATE = """
import sys, time
import distwrap as dw

def pause(frame, event, arg):
    if frame.f_code.co_name == "__exit__":
        sys.settrace(None)
        time.sleep(100)

@dw.distributed(nprocs=2, launcher="script", timeout=100)
def main():
    dw.barrier()
    if dw.rank() == 1:
        time.sleep(0.5)
        raise ValueError("the first cause")
    sys.settrace(pause)

main()
"""


@pytest.mark.slow(INTERPRETERS)
def test_an_interruption_as_the_function_ends(tmp_path: Path) -> None:
    """The news of another's failure may come when rank 0 is just about to leave the function: it comes once."""
    program = tmp_path / "late.py"
    program.write_text(LATE)
    done = run_python(program, timeout=LIMIT)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the first cause"), done.stderr


KILLED = """
import os, time
import distwrap as dw

@dw.distributed(nprocs=2, launcher="script", returns="all")
def main():
    return os.getpid()

pids = main()
if dw.is_rank_zero():
    os.kill(pids[1], 9)
    time.sleep(0.5)
main()
"""


@pytest.mark.slow(INTERPRETERS)
def test_a_rank_is_killed_between_calls(tmp_path: Path) -> None:
    """A parked rank that is gone is named by the next call."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    done = run_python(program, timeout=LIMIT)
    assert done.returncode == 1
    assert re.search("WorkerDiedError: rank 1 on .* killed by SIGKILL", done.stderr), done.stderr
