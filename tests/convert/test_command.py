"""``python -m distwrap convert``: diff, list, files, exit codes, and what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from distwrap.cli import main
from distwrap.convert.conversion import ConversionOptions
from distwrap.convert.converting import convert
from distwrap.convert.script import Script
from tests.interpreters import run_python

CASE = Path(__file__).parent / "cases" / "plain" / "main_function.py"
AFTER = CASE.with_suffix(".after.py").read_text()


def test_a_diff_and_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default nothing is written: the diff and the list are printed."""
    script = tmp_path / "train.py"
    script.write_text(CASE.read_text())
    assert main(["convert", str(script)]) == 0
    out = capsys.readouterr().out
    assert "+    model = wrap_model(model)\n" in out
    assert "done:" in out
    assert "train.py:18: wrap_model: optimizer = torch.optim.SGD(" in out
    assert script.read_text() == CASE.read_text()


def test_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--out writes beside and refuses what is there; --write changes the script, and then has nothing more to do."""
    script, other = tmp_path / "train.py", tmp_path / "new.py"
    script.write_text(CASE.read_text())
    assert main(["convert", str(script), "--out", str(other)]) == 0
    assert other.read_text() == AFTER
    assert script.read_text() == CASE.read_text()
    assert main(["convert", str(script), "--out", str(other)]) == 2
    assert main(["convert", str(script), "--write"]) == 0
    assert main(["convert", str(script), "--write"]) == 0
    assert script.read_text() == AFTER
    assert "uses distwrap already" in capsys.readouterr().out


def test_what_is_written_and_how_it_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last lines say whether anything was written, and how to run what was."""
    script, out = tmp_path / "train.py", tmp_path / "new.py"
    script.write_text(CASE.read_text())
    main(["convert", str(script)])
    assert capsys.readouterr().out.endswith(
        f"nothing is written yet: --write changes {script}, --out NEW.py writes beside it\n"
    )
    main(["convert", str(script), "--out", str(out)])
    assert f"on ranks: DISTWRAP_NPROCS=2 python {out}, or torchrun\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["convert", "check"])
def test_a_file_that_is_no_script(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is missing, a folder, a notebook and one in another encoding are each named, with what to do."""
    (tmp_path / "net.ipynb").write_text('{"cells": []}')
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    expected = {
        "gone.py": "cannot be read: No such file or directory. Give the path of a script.",
        ".": "cannot be read: Is a directory.",
        "net.ipynb": "jupyter nbconvert --to script",
        "latin.py": "# coding: latin-1",
    }
    for name, why in expected.items():
        assert main([command, str(tmp_path / name)]) == 2
        assert why in capsys.readouterr().err


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there is named before anything else is printed."""
    assert main(["convert", str(CASE), "--out", str(tmp_path / "none" / "new.py")]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert f"there is no folder {tmp_path / 'none'} to write new.py into" in told.err


def test_a_number_of_processes_is_positive(capsys: pytest.CaptureFixture[str]) -> None:
    """--nprocs 0 is refused at once, rather than written into the decorator."""
    assert main(["convert", str(CASE), "--nprocs", "0"]) == 2
    assert "--nprocs=0: it must be a whole number of at least 1" in capsys.readouterr().err


def test_the_encoding_stays(tmp_path: Path) -> None:
    """A file is written in its own encoding."""
    script = tmp_path / "train.py"
    script.write_bytes(b"# coding: latin-1\n# \xe9\n" + CASE.read_bytes())
    assert main(["convert", str(script), "--write"]) == 0
    assert script.read_bytes().startswith(b"# coding: latin-1\n# \xe9\n")


def test_wishes() -> None:
    """Strategy, number of processes and the meaning of the batch size go into the script."""
    text = convert(Script(CASE.read_text()), ConversionOptions("fsdp", 4, global_batch=True)).text
    assert '@distributed(strategy="fsdp", nprocs=4)\ndef main(' in text
    assert 'batch_size=int(os.environ["BATCH"])), batch_size="global")' in text


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = 3\n", "there is no training loop"),
        ("x = 3\ndef f(:\n", "line 2: Python 3 cannot read this: invalid syntax"),
        ("x = " + "(" * 3000 + "1" + ")" * 3000, "line 1: Python 3 cannot read this: too many nested parentheses"),
        ("x = " + "not " * 3000 + "1", "cannot read this: its code is nested too deep"),
        ("x = " + "'a' " * 3000, "cannot read this: its code is nested too deep"),
        ("print 3\n", "line 1: Python 3 cannot read this: Missing parentheses in call to 'print'"),
        (
            "from elsewhere import optimizer, model\nfor x in range(3):\n    model(x).backward()\n"
            "    optimizer.step()\n",
            "write: by hand, in the file that makes the model: @distributed",
        ),
        (
            "import torch\nfrom torch.nn.parallel import DistributedDataParallel\n"
            "model = torch.nn.Linear(1, 1)\n"
            "if torch.cuda.is_available():\n    model = DistributedDataParallel(model)\n"
            "optimizer = torch.optim.SGD(model.parameters())\nfor x in torch.ones(3, 1):\n    model(x).backward()\n"
            "    optimizer.step()\n",
            "trains alone",
        ),
    ],
)
def test_what_is_not_clear_is_refused(code: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is not sure, nothing is changed, the exit code says so, and the list says why."""
    script = tmp_path / "train.py"
    script.write_text(code)
    assert main(["convert", str(script), "--write"]) == (2 if "cannot read" in why else 1)
    told = capsys.readouterr()
    assert why in told.out + told.err
    assert script.read_text() == code


GUARDED = """
import torch
class Trainer:
    def __init__(self, model):
        self.model = model.to("cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.loader = torch.utils.data.DataLoader(torch.ones(8, 1))
    def fit(self):
        for x in self.loader:
            self.model(x).sum().backward()
            self.optimizer.step()
        print("done")
"""


def test_a_class_that_a_main_guard_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no function holds all of the training, each rank runs the script, and the last line says how."""
    script = tmp_path / "train.py"
    script.write_text(f'{GUARDED}if __name__ == "__main__":\n    Trainer(torch.nn.Linear(1, 1)).fit()\n')
    assert main(["convert", str(script), "--write", "--nprocs", "3", "--strategy", "fsdp"]) == 0
    assert 'if __name__ == "__main__":\n    setup_process_group()\n    Trainer(' in script.read_text()
    assert f"on ranks: distwrap run -n 3 --strategy fsdp {script}, or torchrun\n" in capsys.readouterr().out


def test_todo_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With TODO lines the exit code is 1, also where the result is written; --strict writes nothing."""
    script = tmp_path / "train.py"
    code = CASE.read_text().replace("targets in train_loader", "targets in other(train_loader)")
    script.write_text(code)
    assert main(["convert", str(script), "--write", "--strict"]) == 1
    assert script.read_text() == code
    assert main(["convert", str(script), "--write"]) == 1
    assert "TODO(distwrap)" in script.read_text()
    assert "for you, at a TODO line:\n  train.py:24: shard_loader: for inputs, targets in" in capsys.readouterr().out


def test_an_ignored_line_stays() -> None:
    """A line with ``# distwrap: ignore`` is not changed."""
    before = CASE.read_text().replace("batch_size=4)", "batch_size=4)  # distwrap: ignore")
    text = convert(Script(before)).text
    assert "    test_loader = DataLoader(test_set, batch_size=4)  # distwrap: ignore\n" in text
    assert "train_loader = shard_loader(" in text


def test_it_never_runs_the_script(tmp_path: Path) -> None:
    """Nothing in a script is executed, neither by convert nor by check."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)\n" + CASE.read_text())
    assert main(["convert", str(script)]) == 0
    assert main(["check", str(script)]) == 0


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_it_starts_its_own_ranks(tmp_path: Path) -> None:
    """A converted script that is simply run starts as many ranks as it is told, and trains as before."""
    out = {}
    for script, ranks, batch in ((CASE, 1, 8), (CASE.with_suffix(".after.py"), 2, 4)):
        out[ranks] = tmp_path / f"{ranks}.pt"
        done = run_python(
            str(script),
            timeout=100,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "DISTWRAP_NPROCS": str(ranks),
                "BATCH": str(batch),
                "OUT": str(out[ranks]),
            },
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("epoch 0: loss") == 1
        assert "of 16" in done.stdout
    first, second = (torch.load(path, weights_only=True) for path in out.values())
    assert all(torch.allclose(first[key], second[key], rtol=0, atol=1e-6) for key in first)


WITHOUT = """
import sys
sys.modules["libcst"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "libcst" else found(name, *more)
from distwrap.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["convert", "check"])
@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_without_libcst(command: str) -> None:
    """distwrap and its command line need no libcst, and these commands say how to install it."""
    done = run_python(
        "-c",
        WITHOUT,
        command,
        str(CASE),
        timeout=100,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 2
    assert "pip install 'distwrap[convert]'" in done.stderr
