"""Standard input belongs to rank 0; the other ranks say so where they read it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distwrap.errors import PlacementError
from distwrap.standard_input import NoInput
from tests.interpreters import run_python
from tests.limits import SOON
from tests.slow import slow
from tests.test_debugging import Terminal

PIPED = """
import sys
import distwrap as dw

@dw.distributed(nprocs=2, launcher=sys.argv[1])
def main():
    try:
        found = sys.stdin.read()
    except RuntimeError as error:
        found = str(error)
    return dw.gather_object(found)

if __name__ == "__main__":
    one, other = main()
    assert one == "one\\ntwo\\n", one
    assert other.startswith("rank 1 has no standard input: "), other
    print("done")
"""

ASKED = """
import sys
import distwrap as dw

@dw.distributed(nprocs=2, launcher=sys.argv[1])
def main():
    answer = dw.rank_zero_only(broadcast=True)(input)("question? ")
    print("answer", dw.gather_object(answer), flush=True)
    if dw.rank() == 0:
        input("again? ")
    else:
        breakpoint()

if __name__ == "__main__":
    main()
"""


def test_a_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to read says which rank has no input, and what to do for a question and for a debugger."""
    monkeypatch.setattr(sys, "stdin", NoInput(3))
    for read in (input, sys.stdin.read, sys.stdin.readline, sys.stdin.buffer.read, lambda: list(sys.stdin)):
        with pytest.raises(PlacementError, match=r"rank 3 has no .*rank_zero_only\(.*\)\(input\).*breakpoint_on\(3\)"):
            read()
    assert not sys.stdin.isatty()


@pytest.mark.parametrize("launcher", ["fork", *(slow(name, why="[fork]") for name in ("forkserver", "spawn"))])
def test_a_pipe_is_read_by_rank_zero(launcher: str, tmp_path: Path) -> None:
    """What is piped into a program comes to rank 0 whole."""
    (tmp_path / "program.py").write_text(PIPED)
    done = run_python("program.py", launcher, cwd=tmp_path, input="one\ntwo\n", timeout=SOON)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.slow("a program")
@pytest.mark.parametrize("launcher", ["fork", "script"])
def test_the_terminal_is_rank_zeros(launcher: str, tmp_path: Path) -> None:
    """Rank 0 asks for all ranks; a debugger on another one ends the run with what to write."""
    (tmp_path / "program.py").write_text(ASKED)
    terminal = Terminal(["program.py", launcher], tmp_path)
    terminal.wait_for("question? ")
    terminal.type("ann")
    terminal.wait_for("['ann', 'ann']")
    terminal.wait_for("PlacementError: rank 1 has no standard input: ")
    assert terminal.exit_code() == 1


@pytest.mark.slow("a program")
def test_the_top_of_a_script_that_runs_again(tmp_path: Path) -> None:
    """A rank that runs the script again takes nothing of the input there, which is rank 0's."""
    top = "import sys, distwrap as dw\nprint('read', input(), flush=True)\n"
    (tmp_path / "program.py").write_text(top + "dw.distributed(nprocs=2, launcher='script')(lambda: None)()\n")
    done = run_python("program.py", cwd=tmp_path, input="a\nb\n", timeout=SOON)
    assert done.returncode == 1
    assert done.stdout == "read a\n"
    assert "rank 1 has no standard input" in done.stderr
