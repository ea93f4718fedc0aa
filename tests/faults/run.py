"""Run cells of the fault matrix as real processes, and check what the caller sees and what is left behind.

python -m tests.faults.run                  the whole matrix, as a table
python -m tests.faults.run --only fork SIGKILL --jobs 2 --write benchmarks/faults-matrix.md
python -m tests.faults.run --times 100 --busy   each launcher and fault a hundred times, with all cores busy
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.faults.cells import LIMIT, LOOP_LIMIT, WHEN, Cell, all_cells, meaningless
from tests.faults.one_cell import Seen, run


def table(results: Sequence[Seen]) -> str:
    """The matrix: a row for launcher, who and fault, a column for when; seconds until the caller knew."""
    by_cell: dict[Cell, list[Seen]] = {}
    for seen in results:
        by_cell.setdefault(seen.cell, []).append(seen)
    rows: dict[tuple[str, str, str], None] = {}
    for cell in all_cells():
        if any(Cell(cell.launcher, cell.who, cell.fault, when) in by_cell for when in WHEN):
            rows[cell.launcher, cell.who, cell.fault] = None
    lines = ["| launcher | who | fault | " + " | ".join(WHEN) + " |", "|---" * (3 + len(WHEN)) + "|"]
    for launcher, who, fault in rows:
        entries = []
        for when in WHEN:
            cell = Cell(launcher, who, fault, when)
            entries.append(_entry(by_cell[cell]) if cell in by_cell else meaningless(cell) and f"({meaningless(cell)})")
        lines.append(f"| {launcher} | {who} | {fault} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def _entry(runs: Sequence[Seen]) -> str:
    failed = sum(bool(seen.wrong) for seen in runs)
    middle = sorted(seen.seconds for seen in runs)[len(runs) // 2]
    return f"{middle:.1f} s" if not failed else f"**{failed} of {len(runs)} fail**" if len(runs) > 1 else "**fails**"


def counts(results: Sequence[Seen], names: Sequence[str] = ("launcher", "fault")) -> str:
    """The table of runs under load: a row for what cells have in common, and how many of its runs were right."""
    rows: dict[tuple[str, ...], list[Seen]] = {}
    for seen in results:
        rows.setdefault(tuple(getattr(seen.cell, name) for name in names), []).append(seen)
    columns = [*names, "right", "late", "wrong", "median", "slowest"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row, runs in rows.items():
        number = Counter(seen.verdict for seen in runs)
        seconds = sorted(seen.seconds for seen in runs)
        numbers = f"{number['right']} | {number['late']} | {number['wrong']}"
        lines.append(f"| {' | '.join(row)} | {numbers} | {seconds[len(runs) // 2]:.1f} s | {seconds[-1]:.1f} s |")
    return "\n".join(lines)


def in_turns(
    cells: Sequence[Any], times: int, done: Sequence[Seen] = (), names: Sequence[str] = ("launcher", "fault")
) -> list[Any]:
    """Each launcher and fault so many times: who fails, and when, in turns. What was done before is left out."""
    rows: dict[tuple[str, ...], list[Any]] = {}
    for cell in cells:
        rows.setdefault(tuple(getattr(cell, name) for name in names), []).append(cell)
    number = Counter(tuple(getattr(seen.cell, name) for name in names) for seen in done)
    turns = [turn for row, own in rows.items() for turn in islice(enumerate(cycle(own)), number[row], times)]
    return [cell for _, cell in sorted(turns, key=lambda turn: turn[0])]  # so that one that is stopped has some of each


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy, each with a process that ends with this one."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    burners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def seen_before(path: Path | None, kind: type) -> list[Seen]:
    """Return the runs that a file keeps, of cells of this kind."""
    if path is None or not path.exists():
        return []
    kept = map(json.loads, path.read_text().splitlines())
    return [
        Seen(kind(*parts), *run) if isinstance(run, list) else Seen(kind(*parts), run)
        for parts, runs in kept
        for run in runs
    ]


def keep(path: Path, results: Sequence[Seen]) -> None:
    """Write runs to a file, a line a cell, with the seconds of each run, and what was wrong with it."""
    by_cell: dict[Any, list[Any]] = {}
    for seen in results:
        seconds = round(seen.seconds, 2)
        by_cell.setdefault(seen.cell, []).append([seconds, seen.wrong] if seen.wrong else seconds)
    lines = [json.dumps([[*vars(cell).values()], runs]) + "\n" for cell, runs in by_cell.items()]
    written = path.with_suffix(".new")
    written.write_text("".join(lines))
    written.replace(path)  # whole, also where it is stopped


def options_of(text: str | None) -> argparse.ArgumentParser:
    """Return the options of a program that runs cells."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a cell must hold")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--write", type=Path, help="write the table there")
    parser.add_argument("--resume", type=Path, help="keep results there, and run only what is missing")
    parser.add_argument("--times", type=int, help="run each launcher, or strategy, and fault so many times, and count")
    parser.add_argument("--busy", action="store_true", help="keep all cores busy meanwhile")
    return parser


def burns(options: argparse.Namespace) -> bool:
    """Say whether processes that only compute run beside the programs, which are too few to keep the cores busy."""
    return bool(options.busy and options.jobs < 2 * (os.cpu_count() or 1))


def results_of(
    cells: Sequence[Any],
    options: argparse.Namespace,
    run: Callable[[Any], Seen] = run,
    names: Sequence[str] = ("launcher", "fault"),
) -> list[Seen]:
    """Run cells, print what is seen, and return it with what was seen before.

    Args:
        cells: all that there are.
        options: of the command.
        run: runs one.
        names: of what cells have in common that are counted together.
    """
    cells = [cell for cell in cells if all(word in str(cell).replace(" | ", "|").split("|") for word in options.only)]
    if not cells:
        sys.exit(f"no cell holds all of these words: {' '.join(options.only)}")
    kept, asked = seen_before(options.resume, type(cells[0])), set(cells)
    results = [seen for seen in kept if seen.cell in asked]
    others = [seen for seen in kept if seen.cell not in asked]
    if options.times:
        cells = in_turns(cells, options.times, results, names)
    else:
        results = [seen for seen in results if not seen.wrong]
        cells = [cell for cell in cells if cell not in {seen.cell for seen in results}]
    if options.busy:
        os.environ[LOOP_LIMIT] = "10"  # which holds for the ranks' arrival too
    # Each worker has its own orphans, and forks callers of its own. Many of them keep the cores busy by themselves.
    load = busy_cores() if burns(options) else contextlib.nullcontext()
    with load, ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for seen in map(Future.result, as_completed([pool.submit(run, cell) for cell in cells])):
            results.append(seen)
            print(f"{seen.verdict:5} {seen.seconds:5.1f} s  {seen.cell}", flush=True)
            if options.resume:
                keep(options.resume, others + results)
            if seen.wrong:
                print("      " + "\n      ".join(seen.wrong), flush=True)
    return results


def summary_of(results: Sequence[Seen]) -> str:
    """Return in a line how many cells fail, and when the caller knew."""
    slowest = max((seen.seconds for seen in results), default=0.0)
    return (
        f"{len(results)} cells, of which {sum(bool(seen.wrong) for seen in results)} fail; the caller knew after "
        f"{sorted(seen.seconds for seen in results)[len(results) // 2]:.1f} s (median), {slowest:.1f} s at most."
    )


def main() -> int:
    """Run the matrix, and print it."""
    options = options_of(__doc__).parse_args()
    cells = [cell for cell in all_cells() if not meaningless(cell)]
    results = sorted(results_of(cells, options), key=lambda seen: cells.index(seen.cell))
    summary = summary_of(results)
    text = f"{counts(results)}\n\n{table(results)}" if options.times else table(results)
    print(text)
    print(summary)
    if options.write:
        at_once = f"{options.jobs} programs at a time on {os.cpu_count()} cores"
        head = HEAD_OF_COUNTS.format(times=options.times, load=f", {at_once}" + " kept busy besides" * burns(options))
        options.write.write_text(f"{head if options.times else HEAD}\n\n{summary}\n\n{text}\n")
    return any(seen.wrong for seen in results)


HEAD = f"""# The fault matrix

Written by `python -m tests.faults.run`: every meaningful combination of launcher, culprit, fault and moment, on real
processes. An entry is the time from the fault until the caller knew, with the exception or exit code that
`tests/faults/cells.py` expects (rank and first cause named), at most {LIMIT:g} s, and nothing left behind: no process,
file, shared memory or variable (under torchrun its log folder, and the sockets of loader workers that it ends, are not
counted; nor, where the caller of elastic is killed, its folder, which the next launch removes). An infinite loop is
known {3:g} s later than other faults, since that is the time limit of its collectives."""

HEAD_OF_COUNTS = f"""# The fault matrix, under load

Written by `make faults`: each launcher and fault {{times}} times{{load}},
with who fails and when in turns. Right is what the fault matrix asks for: the exception or exit code, the rank, the
first cause, nothing left behind, within {LIMIT:g} s at most. Late is right but for the time; wrong is anything else, a
hang included. The second table has the median of each combination's runs. An infinite loop is known 10 s later than
other faults, the time limit of its collectives. Not counted as left behind are, under torchrun, its log folder, and the
sockets of loader workers that it ends, and, where the caller of elastic is killed, its folder, which the next launch
removes."""


if __name__ == "__main__":
    sys.exit(main())
