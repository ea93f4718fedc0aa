"""Metrics on rank 0 alone: to CSV, TensorBoard, Weights & Biases, MLflow, standard output, or any other logger."""

from __future__ import annotations

import atexit
import csv
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from distwrap.checkpoint.files import write_atomically
from distwrap.checks import whole
from distwrap.errors import OptionError
from distwrap.group.collective_guard import guard_collectives
from distwrap.group.rank_zero import on_rank_zero
from distwrap.group.world import RunPart, World, current_world
from distwrap.packages import require_package
from distwrap.wording import unknown_name

Values = Mapping[str, float]

_WITHOUT_PLACE = {  # destinations that take nothing after a colon, and where to say it
    "stdout": "",
    "wandb": ": name the project in wandb.init(project=…), on rank 0, before",
    "mlflow": ": name the experiment in mlflow.set_experiment(…), on rank 0, before",
}


class MetricsDestination(NamedTuple):
    """Place to which metrics go: what writes them, and what closes it where `log` has opened it.

    ``write`` gets the numbers, the step, and whether the step was given or counted.
    """

    write: Callable[[Values, int, bool], object]
    close: Callable[[], object] = lambda: None


def log(metrics: Mapping[str, Any], step: int | None = None, *, to: object = None) -> None:
    """Log metrics on rank 0; on the other ranks do nothing, without waiting.

    The destination is named once, by `to` at the first call, or it is the run of Weights & Biases or MLflow that is
    active on rank 0. The numbers are those of rank 0's own share of the data, and are not averaged. For a number of all
    ranks, call `mean` or `reduce` first, on every rank.

    Args:
        metrics: numbers by name. A tensor or array with one element counts as its number.
        step: the step at which they were measured; by default one more than at the last call, from 0.
        to: where this call and all later ones log to. The path of a file that ends in ``.csv``, to which lines are
            appended; ``"tensorboard"``, also with a folder, as ``"tensorboard:runs/first"``; ``"wandb"`` or
            ``"mlflow"``, for the active run, or else a new one; ``"stdout"``; a ``SummaryWriter``; a run of wandb; the
            module ``mlflow``; any logger with ``log_metrics(metrics, step=…)``, as Lightning's; a function of the
            metrics and the step; or a list of these. Files and runs that `log` opened are closed at the end of the run.

    Raises:
        CollectiveInRankZeroError: on rank 0: a function of `to` calls a collective, to which no other rank comes.
        OptionError: on rank 0: there is no destination, a package is not installed, or a metric is not a number.

    Example:
        >>> log({"loss": torch.tensor(0.25)}, step=10, to="stdout")
        step 10: loss 0.25
        >>> log({"loss": 0.125})
        step 11: loss 0.125
    """
    on_rank_zero(lambda: current_world().part(MetricsLog)).write(metrics, step, to)


class MetricsLog(RunPart):
    """Destinations of the metrics of one run, and the step of the last ones."""

    def __init__(self, world: World) -> None:
        self._opened: dict[object, MetricsDestination] = {}
        self._chosen: list[object] = []
        self._step = -1
        self._writing = threading.RLock()  # of the user's threads, and of a function that logs in turn

    def write(self, metrics: Mapping[str, Any], step: int | None, to: object) -> None:
        """Write metrics to the destination given, or to the one of before, or to what is active."""
        if not isinstance(metrics, Mapping):
            raise OptionError(f"log() takes a dict of numbers by name, not a {type(metrics).__qualname__}.")
        values = {str(name): _number(str(name), value) for name, value in metrics.items()}
        given = None if step is None else int(whole(0)("step", step))
        if isinstance(to, (list, tuple)) and not to:
            raise OptionError(
                f"log(to={to!r}) names no destination: give one, as to='metrics.csv', or leave to= out, for the "
                "destination of the call before."
            )
        with self._writing:
            number = self._step + 1 if given is None else given
            if to is not None:
                self._chosen = [*to] if isinstance(to, (list, tuple)) else [to]
            for destination in [self._open(each) for each in self._chosen or _active()]:
                destination.write(values, number, given is not None)
            self._step = number

    def close(self) -> None:
        """Close what was opened here."""
        atexit.unregister(self.close)
        with ExitStack() as stack:
            for destination in self._opened.values():
                stack.callback(destination.close)
        self._opened.clear()

    def _open(self, destination: object) -> MetricsDestination:
        named = isinstance(destination, (str, os.PathLike))
        key: object = os.fspath(destination) if isinstance(destination, os.PathLike) else destination
        key = key if named else id(key)
        if key not in self._opened:
            self._opened[key] = _of_name(str(key)) if named else _of_logger(destination)
            atexit.unregister(self.close)
            atexit.register(self.close)  # where there is no run, nobody else does; before wandb ends its own service
        return self._opened[key]


def _active() -> list[object]:
    """Return the loggers that have a run here, without importing any."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    found: list[object] = [wandb.run] if wandb is not None and getattr(wandb, "run", None) is not None else []
    if mlflow is not None and hasattr(mlflow, "active_run") and mlflow.active_run() is not None:
        found.append(mlflow)
    if not found:
        raise OptionError(
            "log() has nowhere to log to: no run of wandb or mlflow is active on rank 0. Name the destination "
            "at the first call, as log(metrics, to='metrics.csv'), to='tensorboard', to='wandb', to='mlflow' "
            "or to='stdout'."
        )
    return found


def _of_name(name: str) -> MetricsDestination:
    """Open what a name stands for, or a file."""
    if name.endswith(".csv"):
        table = MetricsTable(Path(name))
        return MetricsDestination(lambda values, step, _: table.write(values, step), table.close)
    kind, _, place = name.partition(":")
    if place and kind in _WITHOUT_PLACE:
        raise OptionError(f"log(to={name!r}): write to={kind!r}, which takes nothing after it{_WITHOUT_PLACE[kind]}.")
    if kind == "stdout":
        return MetricsDestination(lambda values, step, _: print(_as_line(values, step), flush=True))
    if kind == "tensorboard":
        require_package("tensorboard", f"log(to={name!r})", extra="loggers")
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(place or None)
        return _of_logger(writer)._replace(close=writer.close)
    if kind == "wandb":
        require_package("wandb", f"log(to={name!r})", extra="loggers")
        import wandb

        begun = ExitStack()

        def write(values: Values, step: int, given: bool) -> None:
            if wandb.run is None:  # the owner of the one before may have ended it
                begun.close()
                begun.callback(wandb.init().finish)
            _of_logger(wandb.run).write(values, step, given)

        return MetricsDestination(write, begun.close)
    if kind == "mlflow":
        require_package("mlflow", f"log(to={name!r})", extra="loggers", distribution="mlflow-skinny")
        import mlflow

        began = mlflow.active_run() is None
        if began:
            mlflow.start_run()
        return _of_logger(mlflow)._replace(close=mlflow.end_run if began else _leave)
    known = ("tensorboard", "wandb", "mlflow", "stdout")
    hints = {"csv": "Give the path of a file, as 'metrics.csv'.", "print": "Did you mean 'stdout'?"}
    raise OptionError(
        f"log(to={name!r}): {unknown_name('destination', kind, known, hints)} Or a path that ends in .csv."
    )


def _of_logger(logger: Any) -> MetricsDestination:
    """Return how to write to a logger, which stays its owner's to close."""
    if hasattr(logger, "add_scalar"):  # torch's SummaryWriter, and tensorboardX's

        def add_scalars(values: Values, step: int, _: bool) -> None:
            for name, value in values.items():
                logger.add_scalar(name, value, step)

        return MetricsDestination(add_scalars)
    if hasattr(logger, "log_metrics"):  # mlflow, and the loggers of Lightning
        return MetricsDestination(lambda values, step, _: logger.log_metrics(dict(values), step=step))
    if hasattr(logger, "log") and type(logger).__module__.partition(".")[0] == "wandb":
        # wandb counts the steps itself where none is given, and drops what comes before its own count.
        return MetricsDestination(lambda values, step, given: logger.log(dict(values), step=step if given else None))
    if logger is sys.stdout or logger is sys.stderr:
        return MetricsDestination(lambda values, step, _: print(_as_line(values, step), file=logger, flush=True))
    if callable(logger):

        def call(values: Values, step: int, _: bool) -> None:
            in_main = threading.current_thread() is threading.main_thread()  # which else may exchange meanwhile
            with guard_collectives("a function that log() calls") if in_main else nullcontext():
                logger(dict(values), step)

        return MetricsDestination(call)
    raise OptionError(
        f"log(to=…) takes a path that ends in .csv, a name, a SummaryWriter, a run of wandb, the module mlflow, a "
        f"logger with log_metrics(), or a function of metrics and step, not a {type(logger).__qualname__}."
    )


class MetricsTable:
    """CSV file with a line for each call, the step first; a metric that comes later gets a column of its own."""

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.realpath(path))  # the program may change its folder, and a link stays one
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns: list[str] = []
        self._file = self._append()

    def write(self, values: Values, step: int) -> None:
        """Add a line, which is in the file at once."""
        if "step" in values:
            raise OptionError(
                "log(): the column 'step' of a CSV file holds what step= says, so no metric can be called so: "
                "give it another name."
            )
        if not self._is_there():
            self._file.close()
            self._file = self._append()
        row = {"step": step, **values}
        if new := [name for name in row if name not in self._columns]:
            self._widen(new)
        csv.writer(self._file).writerow([row.get(name, "") for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _is_there(self) -> bool:
        """Return whether the file is still the open one: another table has put a wider one there, or it was deleted."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _append(self) -> TextIO:
        rows = self._read()
        self._columns = rows[0] if rows else []
        file = self._path.open("a", newline="", encoding="utf-8")
        if rows and not self._path.read_bytes().endswith((b"\n", b"\r")):
            file.write("\r\n")  # the program that wrote the last line was ended as it did
        return file

    def _read(self) -> list[list[str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8-sig") as file:  # as spreadsheets save it
            return list(csv.reader(file))

    def _widen(self, new: list[str]) -> None:
        """Write the file again with more columns: whole, or not at all."""
        rows = self._read()[1:]
        columns = [*self._columns, *new]

        def write(beside: Path) -> None:
            with beside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)

        write_atomically(self._path, write, self._file.close)
        self._file = self._append()


def _number(name: str, value: Any) -> float:
    """Return a metric as a plain number."""
    if isinstance(value, (int, float)):  # at once; a bool too
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else float(value)
    if hasattr(value, "full_tensor"):
        raise OptionError(
            f"log(): {name!r} is divided over the ranks. On every rank, take {name}.full_tensor() before."
        )
    try:
        found = value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        found = value
    if isinstance(found, Real):
        return _number(name, found if isinstance(found, (int, float)) else float(found))
    size = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise OptionError(
        f"log() takes numbers, and {name!r} is a {type(value).__qualname__}{size}. Take its mean, give its parts names "
        f"of their own, as '{name}/first', or hand what is no number to the logger itself, on rank 0."
    )


def _as_line(values: Values, step: int) -> str:
    numbers = (f"{name} {value if isinstance(value, int) else format(value, '.6g')}" for name, value in values.items())
    return f"step {step}: {', '.join(numbers)}"


def _leave() -> None:
    """Leave open what its owner closes."""
