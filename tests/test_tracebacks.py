"""Tracebacks show the user's frames; those of distwrap between them are left out, unless the user wants them all."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import ModelError, OptionError
from distwrap.testing import run_ranks
from distwrap.tracebacks import as_text, fold, left_out
from tests.interpreters import run_python

ROOT = Path(__file__).parent.parent
OURS = str(ROOT / "distwrap" / "launch" / "worker.py")
TORCH = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "module.py")
PYTHON = os.path.join(sysconfig.get_path("stdlib"), "contextlib.py")
ELSE = os.path.join(sysconfig.get_path("purelib"), "transformers", "model.py")
LIMIT = 200

LEFT_OUT = "left out; DISTWRAP_TRACEBACK=full shows"
STARTS = pytest.mark.slow("starts interpreters")


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable by which this package's own tests see all frames."""
    monkeypatch.delenv("DISTWRAP_TRACEBACK")


def remote(body: Callable[..., object], error: type[BaseException]) -> str:
    """Return the traceback, from the rank, of a body that fails there."""
    with pytest.raises(error) as caught:
        run_ranks(body, 2)
    return str(caught.value.__cause__).partition("raised:\n\n")[2].partition("\n\n(rank")[0]


@pytest.mark.parametrize(
    ("files", "keep_last", "kept"),
    [
        ([OURS, OURS, "me.py"], True, ["me.py"]),
        (["me.py", TORCH, OURS, TORCH, "me.py"], True, ["me.py", "me.py"]),
        (["me.py", PYTHON, OURS, "me.py"], True, ["me.py", "me.py"]),
        (["me.py", OURS, ELSE, OURS, "me.py"], True, ["me.py", ELSE, "me.py"]),
        (["me.py", TORCH, TORCH, "me.py", PYTHON], True, ["me.py", TORCH, TORCH, "me.py", PYTHON]),
        (["me.py", OURS, TORCH, TORCH], True, ["me.py", TORCH, TORCH]),
        (["me.py", TORCH, OURS, OURS], True, ["me.py", OURS]),
        (["me.py", TORCH, OURS, OURS], False, ["me.py"]),
        (["me.py", OURS, TORCH], False, ["me.py"]),
        ([OURS], True, [OURS]),
        ([OURS], False, []),
        ([], True, []),
    ],
)
def test_which_frames_stay(files: list[str], keep_last: bool, kept: list[str]) -> None:
    """The user's, other packages', and the place of an error that is not distwrap's own."""
    out = left_out(files, keep_last=keep_last)
    assert [file for file, is_out in zip(files, out, strict=True) if not is_out] == kept


class Failing(nn.Module):
    """A net whose forward raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise LookupError("in the user's net")


def in_a_forward() -> None:
    model = dw.wrap_model(Failing())
    model(torch.ones(2, 3))


def in_a_backward() -> None:
    model = dw.wrap_model(nn.Linear(3, 1))
    dw.unwrap_model(model)(torch.ones(2, 3)).sum().backward()


def in_a_shape() -> None:
    model = dw.wrap_model(nn.Linear(3, 1))
    model(torch.ones(2, 4))


def in_an_import() -> None:
    Path("broken_module.py").write_text("def f(:\n")
    sys.path.insert(0, "")
    import broken_module  # type: ignore[import-not-found] # noqa: F401


def recursive(depth: int = 0) -> None:
    recursive(depth + 1)


def in_a_chain() -> None:
    try:
        dw.shard_loader([1, 2])  # type: ignore[call-overload]
    except ValueError as error:
        raise RuntimeError("because of the loader") from error


def interrupted() -> None:
    raise KeyboardInterrupt


def test_frames_between_the_users() -> None:
    """Between the call of a wrapped model and its forward there is one line, and no frame of distwrap or torch."""
    told = remote(in_a_forward, LookupError)
    frames = [line for line in told.splitlines() if line.startswith("  ") and not line.startswith("    ")]
    assert len(frames) == 3
    assert frames[0].endswith("in in_a_forward")
    assert frames[1].startswith("  [")
    assert frames[1].endswith(f" frames of distwrap and torch are {LEFT_OUT} them]")
    assert frames[2].endswith("in forward")
    assert told.rstrip().endswith("\nLookupError: in the user's net")


def test_an_error_of_ours_in_a_loop() -> None:
    """The user's line is the last one before it."""
    told = remote(in_a_backward, ModelError)
    lines = told.splitlines()
    assert lines[2].strip() == "dw.unwrap_model(model)(torch.ones(2, 3)).sum().backward()"
    assert LEFT_OUT in lines[-2]
    assert told.count("  File ") == 1


def test_an_error_of_torch() -> None:
    """Those frames of torch stay in which the error was raised."""
    told = remote(in_a_shape, RuntimeError)
    assert "linear.py" in told
    assert f"{os.sep}distwrap{os.sep}" not in told.replace(str(ROOT / "tests"), "")


def test_a_mistake_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SyntaxError in what the user imports shows its line."""
    monkeypatch.chdir(tmp_path)
    told = remote(in_an_import, SyntaxError)
    assert "in in_an_import\n" in told
    assert 'broken_module.py", line 1\n    def f(:\n' in told


def test_a_recursion() -> None:
    """The many frames of a recursion are one line, as Python has it."""
    told = remote(recursive, RecursionError)
    assert "[Previous line repeated " in told
    assert len(told.splitlines()) < 30


def test_a_chain() -> None:
    """What an exception was caused by is there with its frames, and ours are left out of it."""
    told = remote(in_a_chain, RuntimeError)
    cause, effect = told.split("\nThe above exception was the direct cause of the following exception:\n\n")
    assert "dw.shard_loader([1, 2])" in cause
    assert f"[1 frame of distwrap is {LEFT_OUT} it]\ndistwrap.errors.LoaderError: " in cause
    assert effect.count("  File ") == 1


def test_an_interrupt() -> None:
    """A KeyboardInterrupt in the user's code has its traceback."""
    assert remote(interrupted, KeyboardInterrupt).splitlines()[2:4] == [
        "    raise KeyboardInterrupt",
        "KeyboardInterrupt",
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes and groups came with Python 3.11")
def test_notes_and_groups() -> None:
    """Notes come home, and so do the exceptions of a group, each with its own traceback."""

    def grouped() -> None:
        found: list[Exception] = []
        for call in (lambda: {}["missing"], lambda: dw.shard_loader([1])):  # type: ignore[call-overload]
            try:
                call()
            except Exception as error:  # noqa: BLE001
                error.add_note(f"note {len(found)}")
                found.append(error)
        raise ExceptionGroup("several", found)  # noqa: F821

    told = remote(grouped, ExceptionGroup)  # noqa: F821
    assert "ExceptionGroup: several (2 sub-exceptions)" in told
    assert "    | KeyError: 'missing'\n    | note 0\n" in told
    assert f"    |   [1 frame of distwrap is {LEFT_OUT} it]\n    | distwrap.errors.LoaderError: " in told
    assert "    | note 1\n" in told


def test_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """DISTWRAP_TRACEBACK=full shows the launcher's frames, those between the user's, and those in the caller."""
    monkeypatch.setenv("DISTWRAP_TRACEBACK", "full")
    told = remote(in_a_forward, LookupError)
    assert LEFT_OUT not in told
    for name in ("in take_part\n", "in _call_impl\n", "in in_a_forward\n"):
        assert name in told
    with pytest.raises(LookupError) as caught:
        run_ranks(in_a_forward, 2)
    assert "in raise_if_failed" in "".join(traceback.format_tb(caught.tb))


@pytest.mark.parametrize("text", ["ful", "1", "yes"])
def test_a_wrong_word(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another word in the variable is refused, with those that there are."""
    monkeypatch.setenv("DISTWRAP_TRACEBACK", text)
    with pytest.raises(OptionError, match=f"DISTWRAP_TRACEBACK='{text}': say full or short"):
        dw.distributed(nprocs=1)(abs)(1)
    with pytest.raises(OptionError, match="say full or short"):
        dw.setup_process_group()


def files_of(error: BaseException | None) -> list[str]:
    """Return the names of the files on an exception's traceback, but for the one in which launches are watched."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return [name for each in frames if (name := Path(each.filename).name) != "conftest.py"]


@pytest.mark.parametrize("nprocs", [1, 2])
def test_in_the_caller(nprocs: int) -> None:
    """The caller's own traceback has one frame of ours: the decorator's."""
    with pytest.raises(LookupError) as caught:
        dw.distributed(nprocs=nprocs, launcher="forkserver")(_raises)()
    here = Path(__file__).name
    assert files_of(caught.value) == [here, "decorator.py", *([here] if nprocs == 1 else [])]


def _raises() -> None:
    raise LookupError("here")


def test_causes_in_the_caller() -> None:
    """Our frames leave the tracebacks of causes too, in one process."""

    def caught_and_raised() -> None:
        try:
            dw.shard_loader([1, 2])  # type: ignore[call-overload]
        except ValueError as error:
            raise LookupError("because") from error

    with pytest.raises(LookupError) as caught:
        dw.distributed(nprocs=1)(caught_and_raised)()
    assert files_of(caught.value.__cause__) == [Path(__file__).name]


def test_a_circle_of_causes() -> None:
    """Exceptions that cause each other end neither the text nor the folding."""
    one, other = LookupError("one"), LookupError("other")
    one.__cause__, other.__cause__ = other, one
    fold(one)
    assert "LookupError: one" in as_text(one)


SCRIPT = """
import distwrap as dw

@dw.distributed(nprocs=2)
def main():
    {}["missing"]

if __name__ == "__main__":
    main()
"""

TESTS = """
import pytest, torch
from torch import nn
import distwrap as dw
from distwrap.testing import run_ranks

@dw.distributed(nprocs=2)
def main():
    model = dw.wrap_model(nn.Linear(3, 1))
    dw.unwrap_model(model)(torch.ones(2, 3)).sum().backward()

def fails():
    {}["missing"]

def test_decorated():
    main()

def test_one_process():
    dw.distributed(nprocs=1)(fails)()

def test_run_ranks():
    run_ranks(fails, 2)

def test_helper():
    dw.shard_loader([1, 2])

def test_file():
    dw.load("no such file")

def test_option():
    main.options(strategy="fsd")()
"""


def run(*command: str, folder: Path, **env: str) -> str:
    """Return what a Python command that fails has printed."""
    done = run_python(
        *command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}, timeout=LIMIT
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


@STARTS
def test_a_script(tmp_path: Path) -> None:
    """A script that fails on a rank prints three frames: the rank's, the call, and the decorator's."""
    (tmp_path / "train.py").write_text(SCRIPT)
    told = run("train.py", folder=tmp_path)
    lines = [line.strip() for line in told.splitlines()]
    frames = [line.rpartition(os.sep)[2] for line in lines if line.startswith("File ")]
    assert frames[:2] == ['train.py", line 6, in main', 'train.py", line 9, in <module>']
    assert [frame.partition('"')[0] for frame in frames[2:]] == ["decorator.py"]
    assert lines[-1] == "KeyError: 'missing'"


@STARTS
def test_pytest(tmp_path: Path) -> None:
    """Pytest shows the test's frames and the rank's, and none of distwrap's; all of them where they are wanted."""
    (tmp_path / "test_user.py").write_text(TESTS)
    command: tuple[str, ...] = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_user.py")
    told = run(*command, folder=tmp_path)
    assert "6 failed" in told
    assert told.count('{}["missing"]\n') >= 2
    assert 'test_user.py", line 10, in main\n    dw.unwrap_model(model)' in told
    files: list[Any] = [line for line in told.splitlines() if f"distwrap{os.sep}" in line and ".py" in line]
    assert not files, "\n".join(files)
    full = run(*command, "-k", "helper", folder=tmp_path, DISTWRAP_TRACEBACK="full")
    assert f"distwrap{os.sep}data{os.sep}loader.py" in full
