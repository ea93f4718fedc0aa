"""`breakpoint_on` gives the terminal to one rank, and the others wait."""

from __future__ import annotations

import os
import pty
import select
import time
from pathlib import Path

import pytest

import distwrap as dw
from distwrap.errors import OptionError, PlacementError
from distwrap.testing import run_ranks
from tests.forked_commands import PYTHON

LIMIT = 60.0

PROGRAM = """
import sys
import time
import distwrap as dw

@dw.distributed(nprocs=2, launcher=sys.argv[1], timeout=int(sys.argv[2]))
def main():
    secret = 40 + dw.rank()
    dw.breakpoint_on(1)
    secret += 100
    return dw.gather(secret).tolist()

if __name__ == "__main__":
    print("result", main(), flush=True)
"""


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.printed = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execv(PYTHON, [PYTHON, *arguments])

    def wait_for(self, text: str) -> None:
        """Read until the text has come; fail after a limit."""
        deadline = time.monotonic() + LIMIT
        start = len(self.printed)
        while text not in self.printed[start:]:
            assert select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0], self.printed
            try:
                self.printed += os.read(self._fd, 4096).decode()
            except OSError:
                raise AssertionError(f"it ended before {text!r}: {self.printed}") from None

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._fd, line.encode() + b"\n")

    def exit_code(self) -> int:
        """Wait for its end."""
        while True:
            try:
                if not os.read(self._fd, 4096):
                    break
            except OSError:
                break
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._fd)
        return code


@pytest.mark.parametrize("launcher", ["fork", "script"])
@pytest.mark.slow("waits for a limit to pass")
def test_one_rank_has_the_terminal(launcher: str, tmp_path: Path) -> None:
    """The chosen rank can be looked at, stepped and changed, for longer than a collective may take."""
    (tmp_path / "program.py").write_text(PROGRAM)
    limit = 3
    terminal = Terminal(["program.py", launcher, str(limit)], tmp_path)
    terminal.wait_for("(Pdb)")
    time.sleep(limit + 1)  # the time limit of a collective, and of a rank that does not move
    terminal.type("p secret, dw.rank()")
    terminal.wait_for("(41, 1)")
    terminal.type("secret = 1000")
    terminal.type("next")
    terminal.type("p secret + 5")
    terminal.wait_for("1105")
    terminal.type("continue")
    terminal.wait_for("result [140, 1100]")
    assert terminal.exit_code() == 0


def test_without_a_terminal() -> None:
    """Where there is no terminal the chosen rank says so, and no rank waits."""
    with pytest.raises(PlacementError, match="no terminal on rank 1"):
        run_ranks(_stop, 2, 1, timeout=20)


def _stop(rank: int) -> None:
    dw.breakpoint_on(rank)


def test_an_unknown_rank() -> None:
    """A rank that is not there is refused on all ranks."""
    with pytest.raises(OptionError, match="ranks are 0 to 0"):
        dw.breakpoint_on(1)
