"""Times of several ways to do the same, taken in turns, and a table of them beside their goals."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclass(frozen=True)
class Samples:
    """Seconds that one way took, a number for each round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        """The middle number, which a few disturbed rounds do not move."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The number of the least disturbed round."""
        return min(self.seconds)

    def text(self, unit: str) -> str:
        """Write median (min-max)."""
        low, middle, high = (_digits(UNITS[unit] * x) for x in (self.best, self.median, max(self.seconds)))
        return f"{middle} ({low}-{high}) {unit}"

    def over(self, other: Samples) -> float:
        """Return the median of the ratios, round by round: what slows a round down slows both down."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))

    def above(self, other: Samples) -> float:
        """Return the median of the differences, round by round, in seconds."""
        return statistics.median(a - b for a, b in zip(self.seconds, other.seconds, strict=True))


def left_out_of_quick(names: Sequence[str]) -> list[str]:
    """Return the note of what a quick run leaves out, as a list of one; an empty list where that is nothing."""
    return [f"a quick run leaves out: {', '.join(names)}"] if names else []


def _digits(number: float) -> str:
    """Write three digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


@dataclass(frozen=True)
class Row:
    """Line of the table.

    Attributes:
        what: the name of what was timed.
        ours: times with distwrap.
        theirs: times of what it is compared with; ``None`` where there is no such thing.
        unit: ``"s"``, ``"ms"`` or ``"us"``.
        figure: the number that the goal speaks of, in words.
        goal: the goal in words; empty where the row only informs.
        met: whether the goal was reached in this run; ``None`` where there is none.
    """

    what: str
    ours: Samples
    theirs: Samples | None
    unit: str
    figure: str
    goal: str = ""
    met: bool | None = None


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Samples]:
    """Run every way once a round, forwards and backwards in turn, so that a slow minute is shared by all.

    Args:
        ways: functions by name; each returns the seconds it took.
        rounds: how often each one runs.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(ways[name]())
    return {name: Samples(seconds) for name, seconds in taken.items()}


def per_call(body: Callable[[], object], calls: int) -> Callable[[], float]:
    """Make a way for `in_turns` out of something too short to time alone: seconds a call, over that many calls."""

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            body()
        return (time.perf_counter() - start) / calls

    return timed


def arguments(description: str | None, **more: Mapping[str, Any]) -> argparse.Namespace:
    """Read the command line that the benchmarks share.

    Args:
        description: of the benchmark.
        **more: options of its own: what ``add_argument`` takes, by the option's name without dashes.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--against", metavar="PATH", help="measure another checkout of distwrap beside this one, in turns"
    )
    parser.add_argument("--turns", type=int, default=5, help="short runs on each side, with --against; by default 5")
    parser.add_argument("--short", action="store_true", help="few rounds, as --against takes them")
    parser.add_argument("--quick", action="store_true", help="the least of all: does it run? the figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="write every single figure there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the medians there, with min and max (matplotlib)")
    for name, how in more.items():
        parser.add_argument(f"--{name}", **how)
    args = parser.parse_args()
    args.short |= args.quick
    return args


def compare(script: str, args: argparse.Namespace) -> None:
    """Run a benchmark on this checkout and on another, in turns and in processes of their own, and report the ratios.

    A ratio is the median over the turns of the time here over the time there. The second one of a line takes a slow
    minute out: both times are divided by what the line is compared with, as raw torch, in the same run.

    Args:
        script: the benchmark's file, of which both sides run this version.
        args: of the command line, with the other checkout.
    """
    sides = {"here": str(Path(script).resolve().parent.parent), "there": str(Path(args.against).resolve())}
    runs: dict[str, list[dict[str, Row]]] = {"here": [], "there": []}
    for turn in range(1 if args.quick else args.turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            runs[side].append(_short_run(script, sides[side], "--quick" if args.quick else "--short"))
    rows = []
    for what in runs["here"][0]:
        if any(what not in run for run in (*runs["here"], *runs["there"])):
            continue
        here, there = ([run[what] for run in runs[side]] for side in sides)
        ours, theirs = (Samples([row.ours.median for row in side]) for side in (here, there))
        figure = f"{ours.over(theirs):.3f} times"
        if all(row.theirs is not None for row in (*here, *there)):
            relative = [
                Samples([row.ours.median / row.theirs.median for row in side if row.theirs]) for side in (here, there)
            ]
            figure += f", {relative[0].over(relative[1]):.3f} beside the same"
        rows.append(Row(what, ours, theirs, here[0].unit, figure))
    report(f"{Path(script).stem}: {sides['here']}, compared with {sides['there']}", rows, [], args)


def _short_run(script: str, checkout: str, size: str) -> dict[str, Row]:
    """Return the rows of a short or a quick run with the distwrap of a checkout, by name."""
    with TemporaryDirectory() as folder:
        figures = os.path.join(folder, "figures.json")
        command = [sys.executable, str(Path(script).resolve()), size, "--json", figures]
        env = {**os.environ, "PYTHONPATH": checkout}
        # Not in a checkout: `python -c` would find the distwrap of the working directory first.
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True, timeout=900, cwd=folder)
        with open(figures) as file:
            found = json.load(file)["rows"]
    rows = {}
    for row in found:
        ours, theirs = (Samples(row[of]["seconds"]) if row[of] else None for of in ("ours", "theirs"))
        rows[row["what"]] = Row(**{**row, "ours": ours, "theirs": theirs})
    return rows


def report(title: str, rows: Sequence[Row], notes: Sequence[str], args: argparse.Namespace) -> None:
    """Print the table, and write what the command line asks for."""
    print(table(title, rows, notes))
    if args.json:
        figures: dict[str, Any] = {"title": title, "rows": [asdict(row) for row in rows], "notes": list(notes)}
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)
    if args.plot:
        plot(title, rows, args.plot)


def table(title: str, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Lay the rows out in columns."""
    verdict = {True: "met", False: "MISSED", None: ""}
    cells = [("median (min-max)", "distwrap", "compared with", "figure", "goal", "")]
    for row in rows:
        theirs = "" if row.theirs is None else row.theirs.text(row.unit)
        cells.append((row.what, row.ours.text(row.unit), theirs, row.figure, row.goal, verdict[row.met]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([title, "", lines[0], "-" * max(map(len, lines)), *lines[1:], *(f"\n{note}" for note in notes)])


def plot(title: str, rows: Sequence[Row], path: str) -> None:
    """Draw two bars a row, ours and what it is compared with, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.6 * len(rows)), layout="constrained")
    for shift, name, colour in ((-0.2, "distwrap", "tab:blue"), (0.2, "compared with", "tab:gray")):
        pairs = [(y, row.ours if name == "distwrap" else row.theirs) for y, row in enumerate(rows)]
        drawn = [(y + shift, samples) for y, samples in pairs if samples is not None]
        middles = [samples.median for _, samples in drawn]
        below = [samples.median - samples.best for _, samples in drawn]
        above = [max(samples.seconds) - samples.median for _, samples in drawn]
        axes.barh([y for y, _ in drawn], middles, 0.38, xerr=[below, above], label=name, color=colour, ecolor="black")
    axes.set_yticks(range(len(rows)), [row.what for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds: median, with min and max")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
