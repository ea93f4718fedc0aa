"""Places in code: files and cells of notebooks, also where the code has come from another process."""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.errors import CollectiveTimeoutError, ModelError
from distwrap.places import CodeSource, learn, place, source_of
from distwrap.testing import run_ranks

CELL = "<ipython-input-7-0123456789ab>"
KERNEL = "/tmp/ipykernel_4711/123456.py"


@pytest.fixture(autouse=True)
def _no_lines_left() -> Iterator[None]:
    before = set(linecache.cache)
    yield
    for file in set(linecache.cache) - before:
        linecache.cache.pop(file, None)


def of_cell(source: str, file: str = CELL) -> types.SimpleNamespace:
    """Run source as IPython runs a cell, and return what it has defined."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "__main__", "dw": dw, "torch": torch}
    exec(compile(source, file, "exec"), names)
    return types.SimpleNamespace(**names)


def failure_of(body: Callable[[], object], error: type[BaseException], nprocs: int = 2) -> str:
    """Return the traceback of a body that fails on ranks from the fork server."""
    with pytest.raises(error) as caught:
        run_ranks(body, nprocs)
    return str(caught.value.__cause__)


def test_a_file_and_a_cell() -> None:
    """A line is in a file, or in a cell with the number that is beside it."""
    assert place("/home/me/train.py", 88) == "train.py:88"
    assert place(CELL, 3) == "cell 7, line 3"
    assert place("<stdin>", 3) == "<stdin>:3"


def test_a_cell_that_has_come_from_elsewhere() -> None:
    """Its number and its lines are known once its code is here; a cell that ran again has its latest number."""
    assert place(KERNEL, 3) == "123456.py:3"
    learn(CodeSource(KERNEL, 5, ("one\n", "two\n")))
    assert place(KERNEL, 3) == "cell 5, line 3"
    assert linecache.getline(KERNEL, 2) == "two\n"
    linecache.checkcache()
    assert linecache.getline(KERNEL, 2) == "two\n"
    learn(CodeSource(KERNEL, 6, ("one\n", "two\n")))
    assert place(KERNEL, 3) == "cell 6, line 3"


def test_a_file_that_is_there_is_not_sent() -> None:
    """Who gets code of a file reads the file's lines; those of a cell go with the code."""
    assert source_of(__file__) == CodeSource(__file__, None, ())
    of_cell("one = 1\ntwo = 2\n")
    assert source_of(CELL) == CodeSource(CELL, 7, ("one = 1\n", "two = 2\n"))


def test_a_learnt_file_never_replaces_a_real_one(tmp_path: Path) -> None:
    """Lines from elsewhere do not hide those of a file that is there."""
    file = tmp_path / "real.py"
    file.write_text("mine\n")
    learn(CodeSource(str(file), None, ("theirs\n",)))
    assert linecache.getline(str(file), 1) == "mine\n"


def test_a_traceback_from_a_rank() -> None:
    """It names the cell, and shows the lines, of a function, of a closure in it and of a lambda."""
    cell = of_cell("def fails():\n    def closure():\n        return (lambda: {}['missing'])()\n    closure()\n")
    told = failure_of(cell.fails, KeyError)
    assert "  cell 7, line 4, in fails\n    closure()\n" in told
    assert "  cell 7, line 3, in closure\n    return (lambda: {}['missing'])()\n" in told
    assert "  cell 7, line 3, in <lambda>\n" in told
    assert "ipython-input" not in told


def test_arguments_bring_their_lines() -> None:
    """A function and a class's method of other cells, that came as an argument, have their lines too."""
    helper = of_cell(
        "class Net:\n    def forward(self):\n        raise ValueError('x')\n", "<ipython-input-8-ab>"
    ).Net()
    with pytest.raises(ValueError, match="x") as caught:
        run_ranks(of_cell("def calls(net):\n    net.forward()\n").calls, 2, helper)
    told = str(caught.value.__cause__)
    assert "  cell 7, line 2, in calls\n    net.forward()\n" in told
    assert "  cell 8, line 3, in forward\n    raise ValueError('x')\n" in told


@pytest.mark.slow("waits for a limit to pass")
def test_a_hang_report() -> None:
    """It says in which cells the ranks are."""
    source = "def hangs():\n    if dw.rank() == 0:\n        dw.barrier()\n    else:\n        torch.ones(2).share()\n"
    source = source.replace("torch.ones(2).share()", "import time; time.sleep(30)")
    hangs = dw.distributed(nprocs=2, timeout=1)(of_cell(source).hangs)
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 0 in barrier at cell 7, line 3\n  rank 1 .*cell 7, line 5\n"
    ):
        hangs()


def test_where_an_optimizer_was_made() -> None:
    """What the source says of an object is found in the lines of a cell as in those of a file."""
    cell = of_cell(
        "def forgets():\n"
        "    net = torch.nn.Linear(3, 1)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    for _ in range(3):\n"
        "        net(torch.full((2, 3), 1.0 + dw.rank())).sum().backward()\n"
        "        optimizer.step()\n"
    )
    told = failure_of(cell.forgets, ModelError)
    assert "this SGD, made at cell 7, line 3, steps" in told
    assert re.search(r"  cell 7, line 6, in forgets\n    optimizer.step\(\)\n", told)
