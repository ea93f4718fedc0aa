"""launcher="script": how a run ends, when rank 0 is the caller and may sit in native code."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from distwrap.launch.script_rank_zero import RankZero, _AnotherFailed
from tests.interpreters import run_python
from tests.launch.scripted import LIMIT, Run
from tests.limits import SOON
from tests.slow import slow

PROGRAMS = "a program that fails"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        slow("zero fails", "ValueError: the first cause", why=PROGRAMS),
        slow("zero fails, a loader's worker again", r"ValueError: the first cause\s*$", why=PROGRAMS),
        ("one fails, zero waits", "rank 1 on .* raised:(?s:.*)\n.*ValueError: the first cause"),
        slow("one is killed", "WorkerDiedError: rank 1 on .* killed by SIGKILL", why=PROGRAMS),
    ],
)
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


@pytest.mark.slow(PROGRAMS)
def test_the_interrupt_after_a_failure_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What wakes rank 0 after another's failure is no Ctrl-C, though the failure had woken rank 0 by then."""
    monkeypatch.setenv("LATE", "0.1")
    with Run(tmp_path, "one fails, zero waits") as run:
        code, _, errors = run.ended()
    assert code == 1, errors
    assert re.search("rank 1 on .* raised:(?s:.*)\n.*ValueError: the first cause", errors), errors


@pytest.mark.slow(PROGRAMS)
def test_ctrl_c(tmp_path: Path) -> None:
    """A Ctrl-C ends the run within seconds, also where rank 0 waits in native code."""
    with Run(tmp_path, "zero in a collective") as run:
        time.sleep(0.5)
        os.killpg(run.process.pid, signal.SIGINT)
        code, output, errors = run.ended()
    assert code == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "clean-up of rank 0" not in output


@pytest.mark.slow(PROGRAMS)
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


@pytest.mark.slow(PROGRAMS)
def test_the_caller_is_ended(tmp_path: Path) -> None:
    """When a signal ends rank 0, the others end with it."""
    with Run(tmp_path, "zero in a collective") as run:
        run.process.send_signal(signal.SIGTERM)
        assert run.ended()[0] == -signal.SIGTERM


@pytest.mark.slow(PROGRAMS)
def test_where_are_they(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGQUIT prints where the ranks are, though rank 0 is in native code; here in the second call."""
    monkeypatch.setenv("AGAIN", "1")
    with Run(tmp_path, "zero in a collective", ranks=4) as run:
        time.sleep(0.5)
        run.process.send_signal(signal.SIGQUIT)
        assert run.process.stderr is not None
        lines = []
        for line in run.process.stderr:
            lines.append(line)
            if "rank 1" in line:
                break
    assert re.search(r"where the ranks are:\n  rank 0 in barrier at program\.py:\d+\n  rank 1 in main", "".join(lines))


@pytest.mark.slow(PROGRAMS)
def test_sys_exit(tmp_path: Path) -> None:
    """`sys.exit` in the function is the script's exit code."""
    with Run(tmp_path, "exits") as run:
        assert run.ended()[0] == 5


@pytest.mark.slow(PROGRAMS)
def test_exit_between_calls(tmp_path: Path) -> None:
    """A script that exits after its last call takes the parked ranks along, and exit handlers run."""
    with Run(tmp_path, "exits between") as run:
        code, output, errors = run.ended()
    assert (code, errors.count("Traceback")) == (0, 0), errors
    assert output.count("the exit handler of rank 0") == 1


@pytest.mark.slow(PROGRAMS)
def test_a_start_that_fails_midway(tmp_path: Path) -> None:
    """When a rank cannot be started, those before it are ended."""
    with Run(tmp_path, "fails midway", ranks=1) as run:
        code, _, errors = run.ended()
    assert code == 1
    assert "OSError: no more processes" in errors


@pytest.mark.slow(PROGRAMS)
def test_a_rank_that_leaves_early(tmp_path: Path) -> None:
    """A rank that exits cleanly before the others, as by a return, is named by rank 0, which waits for it."""
    program = tmp_path / "leaves.py"
    program.write_text(
        "import sys, distwrap as dw\n"
        "def main():\n"
        "    dw.barrier()\n"
        "    if dw.rank() == 1: sys.exit(0)\n"
        "    dw.barrier()\n"
        "dw.distributed(nprocs=2, launcher='script')(main)()\n"
    )
    done = run_python(program, timeout=LIMIT)
    assert done.returncode == 1
    assert re.search("CollectiveError: rank 0 on .* waited in a collective for rank 1, which had left", done.stderr)


@pytest.mark.slow(PROGRAMS)
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


@pytest.mark.slow(PROGRAMS)
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


@pytest.mark.slow(PROGRAMS)
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


@pytest.mark.slow(PROGRAMS)
def test_a_rank_is_killed_between_calls(tmp_path: Path) -> None:
    """A parked rank that is gone is named by the next call."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    done = run_python(program, timeout=LIMIT)
    assert done.returncode == 1
    assert re.search("WorkerDiedError: rank 1 on .* killed by SIGKILL", done.stderr), done.stderr
