"""A program with two ranks, to be sent signals: a fork of the tests' interpreter, or an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.forked_commands import PYTHON
from tests.limits import SOON
from tests.orphans import lives

PROGRAM = """
import os, signal, sys, time
import torch
import distwrap as dw

@dw.distributed(nprocs=2, launcher=sys.argv[1], timeout=60)
def main(what):
    if what == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heard = []
    if what == "preempted":
        signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))
        signal.signal(signal.SIGUSR2, lambda *_: heard.append("USR2"))
    print("rank", os.getpid(), flush=True)
    try:
        if what == "in a collective" and dw.rank() == 0:
            dw.barrier()
        if what == "with workers":
            for batch in dw.shard_loader(torch.utils.data.DataLoader(torch.arange(10**6), 1, num_workers=2)):
                pass
        end = time.monotonic() + 100
        while time.monotonic() < end and not heard:
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("interrupted", dw.rank(), flush=True)
        raise
    dw.barrier()
    return heard

if __name__ == "__main__":
    if sys.argv[2] == "stubborn":
        from distwrap.launch import supervisor
        supervisor.INTERRUPT_SECONDS = 1000.0
    if sys.argv[2] == "own handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(77))
    print("result", main(sys.argv[2]), flush=True)
"""


class Run:
    """A program with two ranks, which have begun."""

    def __init__(self, folder: Path, launcher: str, what: str, python: str = PYTHON) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self._errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [python, program, launcher, what],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.pids = [int(self.process.stdout.readline().split()[1]) for _ in range(2)]
        time.sleep(0.3)

    def send(self, number: int) -> None:
        """Send a signal to the caller and, as a terminal does, to its group."""
        os.killpg(self.process.pid, number)

    def ended(self, within: float = SOON) -> tuple[int, str, str]:
        """Wait for the end; return exit code, output and errors, and see that no rank is left."""
        output, _ = self.process.communicate(timeout=within)
        self._errors.seek(0)
        left = [pid for pid in self.pids if lives(pid)]
        assert not left, left
        return self.process.returncode, output, self._errors.read()

    def close(self) -> None:
        """End what is left."""
        self.process.kill()
        self.process.communicate()
        self._errors.close()


def said(errors: str) -> list[str]:
    """Return what is on standard error, without the lines that tell of the start."""
    return [line for line in errors.splitlines() if not line.startswith("distwrap: ")]
