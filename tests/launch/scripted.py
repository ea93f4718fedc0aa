"""A program with ranks that run it again, and that ends as it is told to; a fork, or an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.forked_commands import PYTHON
from tests.limits import SOON
from tests.orphans import lives

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

    def __init__(self, folder: Path, what: str, *, ranks: int = 2, python: str = PYTHON) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [python, program, what],
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
        while [pid for pid in self.pids if lives(pid)]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self.process.returncode, output, errors
