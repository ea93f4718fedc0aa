"""In a real Jupyter kernel: cells are launched, their output and errors appear, and an interrupt stops the ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import accelerator
from tests.limits import SOON
from tests.orphans import lives

NIGHTLY = pytest.mark.nightly(row="notebooks", why="test_a_cell_is_launched")

ROOT = Path(__file__).parent.parent.parent
LIMIT = 100
SETUP = """
import os, time
import torch
from torch import nn
import distwrap as dw

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)

scale = 2.0
net = Net()
big = torch.ones(600, 600)
(big @ big).sum()  # threads of the kernel compute now
"""


class Notebook:
    """A kernel, and the cells that were run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._host = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "host.py"],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def cell(self, code: str, interrupt: list[Path] | None = None) -> dict[str, Any]:
        """Run a cell, and return all that came of it."""
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        print(
            json.dumps({"code": code, "interrupt": list(map(str, interrupt or []))}), file=self._host.stdin, flush=True
        )
        answer: dict[str, Any] = json.loads(self._host.stdout.readline())
        return answer

    def run(self, code: str) -> str:
        """Run a cell that succeeds, and return what appears under it."""
        answer = self.cell(code)
        assert not answer["error"], answer["text"]
        return str(answer["printed"])

    def close(self) -> None:
        """End the kernel."""
        self._host.communicate(timeout=LIMIT)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    try:
        notebook.run(SETUP)
        yield notebook
    finally:
        notebook.close()


@pytest.mark.slow("starts a kernel")
def test_a_cell_is_launched(notebook: Notebook) -> None:
    """A function of a cell, with classes and values of other cells, runs on two ranks and gives its value back."""
    printed = notebook.run(
        "@dw.distributed(nprocs=2)\n"
        "def main(steps):\n"
        "    model = dw.wrap_model(net)\n"
        "    for _ in range(steps):\n"
        "        model(torch.ones(2, 3)).sum().backward()\n"
        "    return type(model.module).__name__, dw.gather(dw.rank() * scale).tolist()\n"
        "main(3)"
    )
    assert "('Net', [0.0, 2.0])" in printed
    assert "2 ranks on 1 node" in printed
    assert "started by forkserver" in printed


@NIGHTLY
def test_a_report_appears_in_the_cell(notebook: Notebook) -> None:
    printed = notebook.run(
        "@dw.distributed(nprocs=2, report='new/times.json')\n"
        "def main(steps):\n"
        "    model = dw.wrap_model(net)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(steps):\n"
        "        model(torch.randn(2, 3, generator=dw.rank_generator(0))).sum().backward()\n"
        "        optimizer.step()\n"
        "main(5)"
    )
    assert printed.count("distwrap report: 4 steps") == 1
    assert json.loads((notebook.folder / "new" / "times.json").read_text())["steps"] == 4


@NIGHTLY
def test_a_lambda(notebook: Notebook) -> None:
    """A lambda with a closure is launched too."""
    assert "[[0, 5], [1, 5]]" in notebook.run(
        "five = 5\ndw.distributed(nprocs=2, returns='all')(lambda: [dw.rank(), five])()"
    )


@NIGHTLY
def test_output_appears_in_the_cell(notebook: Notebook) -> None:
    """What ranks print, by Python and natively, is in the cell's output."""
    printed = notebook.run(
        "import sys\n"
        "@dw.distributed(nprocs=2)\n"
        "def talk():\n"
        "    print('printed by', dw.rank())\n"
        "    print('complained by', dw.rank(), file=sys.stderr)\n"
        "    os.write(1, f'natively by {dw.rank()}\\n'.encode())\n"
        "talk()\n"
        "time.sleep(0.5)"
    )
    for rank in range(2):
        for words in ("printed by", "complained by", "natively by"):
            assert f"{words} {rank}\n" in printed


@NIGHTLY
def test_an_error_is_the_cells(notebook: Notebook) -> None:
    """An exception of a rank is the cell's error, in its type, with the traceback from over there."""
    answer = notebook.cell(
        "@dw.distributed(nprocs=2)\n"
        "def fails():\n"
        "    if dw.rank() == 1:\n"
        "        {}['missing']\n"
        "    dw.barrier()\n"
        "fails()"
    )
    assert answer["error"] == "KeyError"
    assert re.search(r"rank 1 on .* raised:", answer["text"])
    assert "{}['missing']" in answer["text"]


@NIGHTLY
@pytest.mark.parametrize("launcher", ["forkserver", "spawn"])
def test_places_are_cells(notebook: Notebook, launcher: str) -> None:
    """A failure and a hang report name the cell as it is numbered, and show the line, of a lambda too."""
    defined = notebook.cell(
        f"@dw.distributed(nprocs=2, launcher='{launcher}', timeout=2)\n"
        "def places(kind):\n"
        "    if dw.rank() == 0:\n"
        "        if kind == 'fails':\n"
        "            (lambda: {}['missing'])()\n"
        "        dw.barrier()\n"
        "    time.sleep(20)\n"
    )
    cell = f"cell {defined['number']}"  # as it stands beside the cell
    failed = notebook.cell("places('fails')")
    assert failed["error"] == "KeyError"
    assert f"  {cell}, line 5, in <lambda>\n    (lambda: {{}}['missing'])()\n" in failed["text"]
    assert failed["text"].count("distwrap/") == 1, failed["text"]  # the decorator's frame
    waited = notebook.cell("places('waits')")
    assert waited["error"] == "CollectiveTimeoutError"
    assert f"rank 0 in barrier at {cell}, line 6\n  rank 1" in waited["text"]
    assert f"at {cell}, line 7\nEvery rank" in waited["text"]
    assert "ipykernel" not in failed["text"] + waited["text"]


@NIGHTLY
def test_a_cell_in_one_process(notebook: Notebook) -> None:
    """An error in a call that runs in the kernel itself shows the cell's lines alone."""
    answer = notebook.cell("dw.distributed(nprocs=1)(lambda: {}['missing'])()")
    assert answer["error"] == "KeyError"
    assert "skipping hidden 1 frame" in answer["text"]
    assert "distwrap/" not in answer["text"]


@NIGHTLY
def test_an_interrupt(notebook: Notebook) -> None:
    """Interrupting the kernel stops the ranks within seconds, and the next cell launches again."""
    notebook.run(
        "@dw.distributed(nprocs=2)\n"
        "def waits():\n"
        "    open(f'pid{dw.rank()}', 'w').write(str(os.getpid()))\n"
        "    if dw.rank() == 0:\n"
        "        dw.barrier()\n"
        "    time.sleep(100)\n"
    )
    notes = [notebook.folder / f"pid{rank}" for rank in range(2)]
    answer = notebook.cell("waits()", interrupt=notes)
    assert answer["error"] == "KeyboardInterrupt"
    assert answer["seconds"] < SOON
    assert not any(lives(int(note.read_text())) for note in notes)
    assert "[0, 1]" in notebook.run("dw.distributed(nprocs=2, returns='all')(dw.rank)()")


@NIGHTLY
def test_the_end_of_the_kernel(tmp_path: Path) -> None:
    """When a kernel is killed while ranks run, they end with it, and so does the fork server."""
    notebook = Notebook(tmp_path)
    try:
        notebook.run(SETUP)
        notebook.run(
            "import threading\n"
            "def waits():\n"
            "    open(f'pid{dw.rank()}', 'w').write(str(os.getpid()))\n"
            "    time.sleep(100)\n"
            "thread = threading.Thread(target=dw.distributed(nprocs=2, launcher='forkserver')(waits), daemon=True)\n"
            "thread.start()\n"
            "while not (os.path.exists('pid0') and os.path.exists('pid1')): time.sleep(0.1)\n"
            "time.sleep(0.2)\n"
            "from distwrap.launch import forkserver\n"
            "open('server', 'w').write(str(forkserver._server.pid))"
        )
    finally:
        notebook.close()
    deadline = time.monotonic() + SOON
    pids = [int((tmp_path / name).read_text()) for name in ("pid0", "pid1", "server")]
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@NIGHTLY
@pytest.mark.gpu
def test_after_a_device_was_used(notebook: Notebook) -> None:
    """A kernel that has used an accelerator launches as before."""
    notebook.run("torch.ones(1, device=torch.accelerator.current_accelerator())")
    assert accelerator() in notebook.run("dw.distributed(nprocs=1, launcher='forkserver')(lambda: str(dw.device()))()")
