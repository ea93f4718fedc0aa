"""Command line that the benchmarks share, and the comparison of two checkouts that it can ask for."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samples import Samples
from table import Row, report


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


def left_out_of_quick(names: Sequence[str]) -> list[str]:
    """Return the note of what a quick run leaves out, as a list of one; an empty list where that is nothing."""
    return [f"a quick run leaves out: {', '.join(names)}"] if names else []


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
