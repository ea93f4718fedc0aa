"""Table of what a benchmark has timed, beside its goals; also as a picture, and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samples import Samples


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
