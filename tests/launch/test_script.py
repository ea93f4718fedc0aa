"""launcher="script": the command line runs again for the other ranks, and rank 0 is the caller."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from distwrap.launch.command_line import again
from tests.interpreters import run_python
from tests.limits import SOON

LIMIT = 60.0
PROGRAMS = "a program under launcher='script'"


@pytest.mark.parametrize(
    ("argv", "file", "in_module", "expected"),
    [
        (["python", "train.py", "--lr", "1"], "/w/train.py", False, ["/w/train.py", "--lr", "1"]),
        (["python", "-X", "dev", "./train.py"], "/w/train.py", False, ["-X", "dev", "/w/train.py"]),
        (["python", "-m", "pack.train", "-v"], "/w/pack/train.py", True, ["-m", "pack.train", "-v"]),
        (["python", "-c", "code", "x"], None, False, ["-c", "code", "x"]),
        (["python", "-O", "folder"], "/w/folder/__main__.py", False, ["-O", "folder"]),
    ],
)
def test_command_line(argv: list[str], file: str | None, in_module: bool, expected: list[str]) -> None:
    """Interpreter flags, modules, inline code and arguments are repeated; a script goes by its full path."""
    assert again(argv, file, in_module) == [sys.executable, *expected]


def run(arguments: list[str], folder: Path, code: int | None = 0) -> str:
    """Run python and return all it printed; fail after a limit, or with another exit code."""
    done = run_python(*arguments, cwd=folder, timeout=LIMIT)
    output = done.stdout + done.stderr
    assert code is None or done.returncode == code, output
    return output


TWO_CALLS = """
import sys
import distwrap as dw

@dw.distributed(nprocs=3, launcher="script")
def add(n):
    return dw.gather(n * 10 + dw.rank()).tolist()

@dw.distributed(nprocs=3, launcher="script", returns="all")
def ranks(seen):
    return dw.rank(), seen

if __name__ == "__main__":
    first = add(int(sys.argv[1]))
    second = ranks(first)
    print("after", first, second)
"""


def test_two_calls_in_one_script(tmp_path: Path) -> None:
    """The ranks take rank 0's result from call to call, and only rank 0 runs on after the last."""
    (tmp_path / "two.py").write_text(TWO_CALLS)
    output = run(["-m", "two", "4"], tmp_path)
    ranks = [(rank, [40, 41, 42]) for rank in range(3)]
    assert output.count("after") == 1
    assert f"after [40, 41, 42] {ranks}" in output


@pytest.mark.slow(PROGRAMS)
def test_inline_code(tmp_path: Path) -> None:
    """`python -c` is repeated too."""
    code = (
        "import distwrap as dw\n"
        "f = dw.distributed(nprocs=2, launcher='script')(lambda: dw.gather(dw.rank()).tolist())\n"
        "print('got', f())"
    )
    assert run(["-c", code], tmp_path).count("got [0, 1]") == 1


@pytest.mark.slow(PROGRAMS)
def test_no_main_guard_is_needed(tmp_path: Path) -> None:
    """Code at the top level runs in every rank, and the call in it is joined."""
    (tmp_path / "bare.py").write_text(
        "import distwrap as dw\nprint('top', flush=True)\n"
        "print('got', dw.distributed(nprocs=2, launcher='script')(dw.world_size)())\n"
    )
    output = run(["bare.py"], tmp_path)
    assert output.count("top") == 2
    assert output.count("got 2") == 1


@pytest.mark.slow(PROGRAMS)
def test_caller_is_unchanged(tmp_path: Path) -> None:
    """After the call rank 0 has its environment and threads back, and stands alone."""
    (tmp_path / "same.py").write_text(
        "import os, torch, distwrap as dw\n"
        "before = dict(os.environ), torch.get_num_threads()\n"
        "dw.distributed(nprocs=2, launcher='script')(dw.barrier)()\n"
        "assert (dict(os.environ), torch.get_num_threads()) == before\n"
        "assert dw.placement().source == 'single' and not torch.distributed.is_initialized()\n"
        "print('same')\n"
    )
    assert run(["same.py"], tmp_path).count("same") == 1


@pytest.mark.slow(PROGRAMS)
def test_a_rank_fails(tmp_path: Path) -> None:
    """While rank 0 works or waits, another rank's exception ends the run, and is raised in its own type."""
    (tmp_path / "fails.py").write_text(
        "import sys, time, distwrap as dw\n"
        "@dw.distributed(nprocs=3, launcher='script')\n"
        "def main():\n"
        "    if dw.rank() == 2: raise KeyError('first cause')\n"
        "    if sys.argv[1] == 'wait': dw.barrier()\n"
        "    else: time.sleep(100)\n"
        "try: main()\n"
        "except KeyError as error: print('caught', error, error.rank, 'in main' in str(error.__cause__))\n"
    )
    for how in ("wait", "work"):
        start = time.monotonic()
        assert "caught 'first cause' 2 True" in run(["fails.py", how], tmp_path)
        assert time.monotonic() - start < SOON


@pytest.mark.slow(PROGRAMS)
def test_rank_zero_fails(tmp_path: Path) -> None:
    """Rank 0's exception is raised as it is, and the others are stopped."""
    (tmp_path / "fails.py").write_text(
        "import time, distwrap as dw\n"
        "@dw.distributed(nprocs=2, launcher='script')\n"
        "def main():\n"
        "    if dw.rank() == 0: raise KeyError('mine')\n"
        "    time.sleep(100)\n"
        "main()\n"
    )
    start = time.monotonic()
    assert "KeyError: 'mine'" in run(["fails.py"], tmp_path, code=1)
    assert time.monotonic() - start < SOON


@pytest.mark.slow(PROGRAMS)
def test_retrofit_trains_the_callers_model(tmp_path: Path) -> None:
    """With retrofit the caller is rank 0 itself, so its own model is trained in place."""
    (tmp_path / "fit.py").write_text(
        "import torch, distwrap as dw\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "@dw.distributed(nprocs=2, launcher='script', retrofit=True)\n"
        "def fit(model, optimizer):\n"
        "    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); return model\n"
        "model = nn.Linear(2, 1); before = model.weight.clone()\n"
        "got = fit(model, torch.optim.SGD(model.parameters(), lr=0.5))\n"
        "assert got is model, type(got)\n"
        "torch.testing.assert_close(model.weight, before - 0.5)\n"
        "print('trained')\n"
    )
    assert run(["fit.py"], tmp_path).count("trained") == 1


@pytest.mark.slow(PROGRAMS)
def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """A second call that asks for another number of ranks is refused with the way out."""
    (tmp_path / "grows.py").write_text(
        "import distwrap as dw\n"
        "f = dw.distributed(nprocs=2, launcher='script')(dw.world_size)\n"
        "f(); f.options(nprocs=3)()\n"
    )
    assert "Ask for the same number in all calls" in run(["grows.py"], tmp_path, code=1)


@pytest.mark.slow(PROGRAMS)
def test_a_call_in_one_process_before(tmp_path: Path) -> None:
    """A decorated call of one process, before the one that launches, is a plain call in every rank."""
    (tmp_path / "mixed.py").write_text(
        "import distwrap as dw\n"
        "@dw.distributed(nprocs=1)\n"
        "def prepare(): return dw.world_size()\n"
        "@dw.distributed(nprocs=2, launcher='script')\n"
        "def main(seen): return dw.gather(dw.rank() + seen).tolist()\n"
        "print('got', main(prepare()))\n"
    )
    assert run(["mixed.py"], tmp_path).count("got [1, 2]") == 1


@pytest.mark.slow(PROGRAMS)
def test_ranks_at_different_calls_are_told(tmp_path: Path) -> None:
    """When a branch led another rank to another call, that is said, and nothing is mixed up."""
    (tmp_path / "branch.py").write_text(
        "import distwrap as dw\n"
        "a = dw.distributed(nprocs=2, launcher='script')(dw.rank)\n"
        "b = dw.distributed(nprocs=2, launcher='script')(dw.world_size)\n"
        "a() if dw.is_rank_zero() else b()\n"
    )
    output = run(["branch.py"], tmp_path, code=1)
    assert "rank 1 has come to world_size(), but rank 0 is at rank()" in output


@pytest.mark.slow(PROGRAMS)
def test_a_call_after_a_failure_is_refused(tmp_path: Path) -> None:
    """After a failed call the other ranks cannot be brought to the next one, and that is said."""
    (tmp_path / "again.py").write_text(
        "import distwrap as dw\n"
        "def fails(): raise KeyError('x')\n"
        "try: dw.distributed(nprocs=2, launcher='script')(fails)()\n"
        "except KeyError: dw.distributed(nprocs=2, launcher='script')(dw.rank)()\n"
    )
    assert "fails() has failed before" in run(["again.py"], tmp_path, code=1)


@pytest.mark.slow(PROGRAMS)
def test_a_collective_without_rank_zero_is_explained(tmp_path: Path) -> None:
    """When another rank waits for rank 0, which is done, the run ends and says so."""
    (tmp_path / "uneven.py").write_text(
        "import distwrap as dw\n"
        "def main():\n"
        "    if dw.rank() == 1: dw.barrier()\n"
        "dw.distributed(nprocs=2, launcher='script')(main)()\n"
    )
    assert "waited in a collective for rank 0, which had left" in run(["uneven.py"], tmp_path, code=1)
