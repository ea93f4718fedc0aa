"""The fork server's memory in large pages, of which forks are faster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.interpreters import run_python

MODULE = Path(__file__).parents[2] / "distwrap" / "launch" / "large_pages.py"

PROGRAM = """
import mmap, os, re, runpy, sys
use_large_pages = runpy.run_path(sys.argv[1])["use_large_pages"]

def large():
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"AnonHugePages: *([0-9]+)", file.read())[1])

memory = mmap.mmap(-1, 1 << 25, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
numbers = os.urandom(1 << 25)
memory[:] = numbers
before = large()
made = use_large_pages()
after = large()
pid = os.fork()
if pid == 0:
    memory[:10] = bytes(10)
    os._exit(memory[10:] != numbers[10:])
assert os.waitpid(pid, 0)[1] == 0
assert memory[:] == numbers
print(made, (after - before) >> 11)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such pages")
@pytest.mark.slow("others of its kind are in make test")
def test_memory_is_the_same() -> None:
    """As many pages are made as it says, as far as this kernel makes any; a fork's writing stays its own."""
    done = run_python("-c", PROGRAM, MODULE, timeout=60)
    assert done.stderr == ""
    made, counted = map(int, done.stdout.split())
    assert made >= counted >= (made > 0) * 15
