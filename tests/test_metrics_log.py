"""Metrics of rank 0, each destination read back from what its own package has written."""

from __future__ import annotations

import csv
import json
import os
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import distwrap as dw
from distwrap.errors import CollectiveInRankZeroError, OptionError
from distwrap.group.world import current_world
from distwrap.metrics_log import MetricsLog
from distwrap.testing import run_ranks
from tests.interpreters import run_python


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rank_zero_alone_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The numbers are rank 0's own, each once; other ranks do nothing, not even look at what they are given."""
    path = tmp_path / "new" / "metrics.csv"

    def train() -> int:
        for step in range(3):
            dw.log({"loss": torch.tensor(step + 10.0 * dw.rank())}, step, to=[path, "stdout"])
        if dw.rank() == 1:
            dw.log(None, "never", to="nowhere")  # type: ignore[arg-type]
        return dw.rank()

    assert run_ranks(train, 2) == [0, 1]
    assert rows(path) == [{"step": str(step), "loss": f"{step}.0"} for step in range(3)]
    assert [*path.parent.iterdir()] == [path]
    assert [line for line in capfd.readouterr().out.splitlines() if "loss" in line] == [
        f"step {step}: loss {step}" for step in range(3)
    ]


def test_a_line_that_was_cut_off_stays_a_line_of_its_own(tmp_path: Path) -> None:
    """A file whose last line has no end, as after a crash, is not joined with the next line."""
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\r\n0,0.5\r\n1,0.25")
    dw.distributed(nprocs=1)(lambda: dw.log({"loss": 0.125}, step=2, to=path))()
    assert [(row["step"], row["loss"]) for row in rows(path)] == [("0", "0.5"), ("1", "0.25"), ("2", "0.125")]


def test_a_destination_is_said_once(tmp_path: Path) -> None:
    """It holds for the calls after it, until the end of the run; steps are counted on where none is given."""

    @dw.distributed(nprocs=1)
    def train() -> None:
        dw.log({"loss": 1}, to=tmp_path / "a.csv")
        dw.log({"loss": 2})
        dw.log({"loss": 3}, step=10)
        dw.log({"loss": 4})

    train()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "a.csv")] == [
        ("0", "1"),
        ("1", "2"),
        ("10", "3"),
        ("11", "4"),
    ]

    @dw.distributed(nprocs=1)
    def again() -> None:
        dw.log({"loss": 1})

    with pytest.raises(OptionError, match=r"log\(\) has nowhere to log to: .* log\(metrics, to='metrics.csv'\)"):
        again()


def test_a_table_grows(tmp_path: Path) -> None:
    """A metric that comes later gets a column, lines of an earlier run stay, and each line is there at once."""
    path = tmp_path / "metrics.csv"

    @dw.distributed(nprocs=1)
    def train(first: int) -> None:
        dw.log({"loss": 1.5}, first, to=str(path))
        dw.log({"accuracy": 0.5, "a, b": float("nan")}, first)
        assert len(rows(path)) == first + 2

    train(0)
    train(2)
    assert rows(path) == [
        {"step": step, "loss": loss, "accuracy": accuracy, "a, b": odd}
        for step in ("0", "2")
        for loss, accuracy, odd in (("1.5", "", ""), ("", "0.5", "nan"))
    ]


def test_a_table_that_others_have_written(tmp_path: Path) -> None:
    """A last line that was cut short stays one of its own, and the mark of a spreadsheet is no part of a name."""
    (tmp_path / "cut.csv").write_bytes(b"step,loss\r\n0,1.0\r\n1,2.")
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbfstep,loss\r\n0,1.0\r\n")

    @dw.distributed(nprocs=1)
    def train(path: Path, step: int) -> None:
        dw.log({"loss": 3.0}, step, to=path)

    train(tmp_path / "cut.csv", 2)
    train(tmp_path / "marked.csv", 1)
    assert (tmp_path / "cut.csv").read_text().splitlines() == ["step,loss", "0,1.0", "1,2.", "2,3.0"]
    assert (tmp_path / "marked.csv").read_text("utf-8-sig").splitlines() == ["step,loss", "0,1.0", "1,3.0"]


def test_a_table_of_two_runs(tmp_path: Path) -> None:
    """No line is lost if a call in between gives the file more columns, or if somebody deletes it."""
    path = tmp_path / "metrics.csv"

    @dw.distributed(nprocs=1)
    def before_and_after() -> None:
        first, second = (MetricsLog(current_world()) for _ in range(2))
        first.write({"a": 1}, 0, path)
        second.write({"b": 2}, 1, path)
        first.write({"a": 3}, 2, None)
        assert rows(path) == [
            {"step": "0", "a": "1", "b": ""},
            {"step": "1", "a": "", "b": "2"},
            {"step": "2", "a": "3", "b": ""},
        ]
        path.unlink()
        second.write({"b": 4}, 3, None)
        assert rows(path) == [{"step": "3", "b": "4"}]
        first.close()
        second.close()

    before_and_after()


def test_a_table_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that goes to another folder goes on in the same file, and a link stays a link."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "metrics.csv").symlink_to(tmp_path / "elsewhere" / "real.csv")
    monkeypatch.chdir(tmp_path)

    @dw.distributed(nprocs=1)
    def train() -> None:
        dw.log({"a": 1}, to="metrics.csv")
        os.chdir(tmp_path / "elsewhere")
        dw.log({"b": 2})

    train()
    assert (tmp_path / "metrics.csv").is_symlink()
    assert rows(tmp_path / "metrics.csv") == [{"step": "0", "a": "1", "b": ""}, {"step": "1", "a": "", "b": "2"}]
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["real.csv"]


def test_threads_log_at_once(tmp_path: Path) -> None:
    """Threads of the user's that log to one table, with columns of their own, lose no line."""

    @dw.distributed(nprocs=1)
    def train() -> None:
        dw.log({"start": 0}, to=tmp_path / "metrics.csv")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda number: dw.log({f"metric {number // 10}": number}), range(100)))

    train()
    found = rows(tmp_path / "metrics.csv")
    assert sorted(int(row["step"]) for row in found) == list(range(101))
    assert sorted(int(number) for row in found[1:] for name, number in row.items() if number and name != "step") == [
        *range(100)
    ]


def test_a_function_that_calls_a_collective() -> None:
    """No other rank comes to it, so it is an error at once, and nobody waits for the timeout."""

    def train() -> str:
        words = ""
        try:
            dw.log({"loss": 1.0}, to=lambda metrics, _: dw.mean(metrics["loss"]))
        except CollectiveInRankZeroError as error:
            words = str(error)
        dw.barrier()
        return words

    words, nothing = run_ranks(train, 2)
    assert words.startswith("rank 0 called mean() inside a function that log() calls, which the other ranks do not run")
    assert nothing == ""


def test_whole_numbers_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts have all their digits on standard output, however many."""
    dw.log({"tokens": 12345678, "all": 10**400, "loss": 1 / 3}, 0, to="stdout")
    assert capsys.readouterr().out == f"step 0: tokens 12345678, all {10**400}, loss 0.333333\n"


@pytest.mark.parametrize("nowhere", [[], ()])
def test_a_list_without_a_destination(nowhere: object) -> None:
    """An empty list is an error, and the destination stays what it was."""
    found: list[int] = []
    with pytest.raises(OptionError, match=rf"log\(to={re.escape(repr(nowhere))}\) names no destination: .*leave to="):
        dw.log({"x": 1}, to=nowhere)
    dw.log({"x": 1}, 3, to=lambda _, step: found.append(step))
    with pytest.raises(OptionError, match="names no destination"):
        dw.log({"x": 1}, to=nowhere)
    dw.log({"x": 1})
    assert found == [3, 4]


def test_nothing_is_written_where_one_destination_is_unknown(tmp_path: Path) -> None:
    """A wrong name in a list is an error before any destination has the line."""
    found: list[float] = []
    train = dw.distributed(nprocs=1)(lambda: dw.log({"x": 1}, to=[lambda values, _: found.append(1), "tensorbord"]))
    with pytest.raises(OptionError, match="unknown destination"):
        train()
    assert found == []


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        numpy.float32(0.5),
        numpy.float64(0.5),
        numpy.array(0.5),
        torch.tensor(0.5),
        torch.tensor([0.5]),
        torch.ones(1).mul(0.5).bfloat16(),
    ],
)
def test_what_has_one_number_is_that_number(value: Any) -> None:
    """Tensors and arrays of one element, also with a gradient, become plain numbers."""
    found: list[tuple[dict[str, float], int]] = []
    dw.log({"x": value}, step=3, to=lambda metrics, step: found.append((metrics, step)))
    assert found == [({"x": 0.5}, 3)]
    assert type(found[0][0]["x"]) is float


@pytest.mark.parametrize(
    ("metrics", "options", "words"),
    [
        ({"x": torch.ones(2)}, {}, r"'x' is a Tensor of shape \(2,\)\. Take its mean"),
        ({"x": "0.5"}, {}, "'x' is a str"),
        ({"x": {"y": 1}}, {}, "'x' is a dict"),
        ([1], {}, "a dict of numbers by name, not a list"),
        ({"x": 1}, {"step": -1}, "step=-1: it must be"),
        ({"x": 1}, {"step": 1.5}, "step=1.5: it must be"),
        ({"x": 1}, {"to": "tensorbord"}, "unknown destination 'tensorbord'. Did you mean 'tensorboard'?"),
        ({"x": 1}, {"to": "wandb:name"}, r"write to='wandb', .* name the project in wandb.init\(project=…\)"),
        ({"x": 1}, {"to": "csv"}, "Give the path of a file, as 'metrics.csv'"),
        ({"x": 1}, {"to": 3}, "not a int"),
    ],
)
def test_what_cannot_be_logged_is_named(metrics: Any, options: dict[str, Any], words: str) -> None:
    """What is no number, no step or no destination is an error that says what to do."""
    with pytest.raises(OptionError, match=words):
        dw.log(metrics, **{"to": lambda metrics, step: None, **options})


def test_a_column_of_the_steps_own(tmp_path: Path) -> None:
    """A metric called step would lose the step of a CSV file, and is refused."""
    train = dw.distributed(nprocs=1)(lambda: dw.log({"step": 3}, to=tmp_path / "metrics.csv"))
    with pytest.raises(OptionError, match="give it another name"):
        train()


def test_loggers_of_others() -> None:
    """Lightning's loggers, with log_metrics, and writers, with add_scalar, are taken as they are, and not closed."""
    told: list[tuple[Any, ...]] = []

    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            told.append((metrics, step))

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

    dw.log({"x": 1, "y": 2}, step=5, to=[Logger(), Writer()])
    assert told == [({"x": 1, "y": 2}, 5), ("x", 1, 5), ("y", 2, 5)]


PROGRAM = """
import json
import sys

import torch

import distwrap as dw


@dw.distributed(nprocs=2)
def train(kind):
    to = kind
    if kind == "an active run of wandb":
        import wandb

        run, to = dw.on_rank_zero(lambda: wandb.init(project="tests")), None
    if kind == "an active run of mlflow":
        import mlflow

        run, to = dw.on_rank_zero(mlflow.start_run), None
    for step in range(0, 30, 10):
        dw.log({"loss": torch.tensor(step + 0.5) + 100 * dw.rank()}, step=step, to=to)
    if to is None:
        run.finish() if "wandb" in kind else dw.on_rank_zero(lambda: mlflow.end_run)()


if __name__ == "__main__":
    train(sys.argv[1])
"""
LOGGED = [["loss", 0.5, 0], ["loss", 10.5, 10], ["loss", 20.5, 20]]


def logged(kind: str, folder: Path, reader: str) -> Any:
    """Train on two ranks in a program of its own, and return what another one reads of the files."""
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    env |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    env |= {"DISTWRAP_QUIET": "1", "HOME": str(folder), "PYTHONPATH": str(Path(dw.__file__).parents[1])}
    script = folder / "train.py"
    script.write_text(PROGRAM)
    for words in ([script, kind], ["-c", reader]):
        done = run_python(*words, cwd=folder, env=env, timeout=90)
        assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


READ_TENSORBOARD = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

found = EventAccumulator("runs/first").Reload()
print(json.dumps([[name, each.value, each.step] for name in found.Tags()["scalars"] for each in found.Scalars(name)]))
"""

# The format of LevelDB's log: blocks of 32 KiB, in which a record is in one piece or several.
READ_WANDB = """
import json
import struct
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

[path] = Path("wandb").glob("offline-run-*/*.wandb")
data, at, record, found = path.read_bytes(), 7, b"", []
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, size, kind = struct.unpack("<IHB", data[at : at + 7])
    record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):
        row = Record.FromString(record).history
        record, values = b"", {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item}
        found += [["loss", values["loss"], values["_step"]]] if "loss" in values else []
print(json.dumps(found))
"""


@needs("tensorboard")
@pytest.mark.slow("programs on two ranks, which import tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    """TensorBoard reads rank 0's numbers from the folder that the destination names."""
    assert logged("tensorboard:runs/first", tmp_path, READ_TENSORBOARD) == LOGGED


@needs("wandb")
@pytest.mark.slow("programs on two ranks, which import wandb and start its service")
@pytest.mark.parametrize("kind", ["wandb", "an active run of wandb"])
def test_wandb(kind: str, tmp_path: Path) -> None:
    """One run of Weights & Biases has rank 0's numbers at their steps, whether log has begun it or the loop."""
    assert logged(kind, tmp_path, READ_WANDB) == LOGGED


TWO_RUNS = """
import wandb

import distwrap as dw

for number in range(2):
    run = wandb.init(project="tests")
    dw.log({"loss": number}, to="wandb")
    assert run.summary["loss"] == number
    run.finish()
dw.log({"loss": 2})  # in a run that log begins, and ends
"""


@needs("wandb")
@pytest.mark.slow("a program that imports wandb and starts its service")
def test_wandb_outside_of_a_run(tmp_path: Path) -> None:
    """The name stands for the run that is active at each call; one that log begins is finished before wandb ends."""
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    env |= {"PYTHONPATH": str(Path(dw.__file__).parents[1])}
    done = run_python("-c", TWO_RUNS, cwd=tmp_path, env=env, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 3


@needs("mlflow", "sqlalchemy", "alembic")
@pytest.mark.slow("programs on two ranks, which import mlflow and make its database")
@pytest.mark.parametrize("kind", ["mlflow", "an active run of mlflow"])
def test_mlflow(kind: str, tmp_path: Path) -> None:
    """One run of MLflow has rank 0's numbers at their steps, and is finished."""
    assert logged(kind, tmp_path, "print('[]')") == []
    base = sqlite3.connect(tmp_path / "mlflow.db")
    try:
        assert base.execute("select status from runs").fetchall() == [("FINISHED",)]
        assert [[*row] for row in base.execute("select key, value, step from metrics order by step")] == LOGGED
    finally:
        base.close()


WITHOUT_LOGGERS = """
import sys

for name in ("tensorboard", "wandb", "mlflow"):
    sys.modules[name] = None
import distwrap as dw

for name in ("tensorboard", "wandb", "mlflow"):
    try:
        dw.log({"x": 1}, to=name)
    except dw.DistwrapError as error:
        print(error)
dw.log({"x": 1}, to="stdout")
"""


@pytest.mark.slow("a program")
def test_without_the_packages() -> None:
    """A logger whose package is not installed is named with the line that installs it; the others need none."""
    done = run_python("-c", WITHOUT_LOGGERS, timeout=60, check=True)
    packages = ("tensorboard", "wandb", "mlflow-skinny")
    assert done.stdout.splitlines() == [
        *(
            f"log(to={package.partition('-')[0]!r}) needs the package {package!r}, which is not installed: pip install "
            f"'distwrap[loggers]'."
            for package in packages
        ),
        "step 0: x 1",
    ]
