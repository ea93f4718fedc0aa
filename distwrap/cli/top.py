"""``python -m distwrap top`` and ``where``: the ranks of the runs on this node, as they show themselves."""

import argparse
import os
import shutil
import sys
import time
from typing import Any

from distwrap.checks import SECONDS
from distwrap.supervision.locations import LEFT, NO_ANSWER, Location, merge, seen_at
from distwrap.supervision.runs import Run, runs, where_all_are
from distwrap.supervision.shown import Shown
from distwrap.wording import as_memory

_HOME, _CLEAR = "\x1b[H", "\x1b[J"
_LATE = 5.0  # seconds after which a rank should have shown itself again


def add_arguments(commands: Any) -> None:
    """Add the commands and their options to the command line."""
    top: argparse.ArgumentParser = commands.add_parser(
        "top",
        description="Shows the ranks of your runs on this node: where each one is, how fast it is, and how much it "
        "waits. Under Slurm: srun --overlap --jobid JOB python -m distwrap top --once. Ctrl-C ends "
        "the table, not the run. Exit code: 1 where nothing runs.",
    )
    _add_pid(top)
    top.add_argument("--once", action="store_true", help="print one table, and end")
    top.add_argument("--seconds", type=float, default=2.0, help="seconds between two tables; by default 2")
    top.set_defaults(run=run_top)
    where: argparse.ArgumentParser = commands.add_parser(
        "where",
        description="Prints the line of the program in which each rank is, as the run itself does when its caller "
        "gets SIGQUIT. Exit code: 1 where nothing runs.",
    )
    _add_pid(where)
    where.set_defaults(run=run_where)


def _add_pid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pid",
        nargs="?",
        type=int,
        help="process id of the program that runs, or of one of its ranks; by default all of your runs",
    )


def run_top(given: argparse.Namespace) -> int:
    """Print tables until the runs end, or Ctrl-C; return the exit code."""
    SECONDS("--seconds", given.seconds)
    refreshes = sys.stdout.isatty() and not given.once
    seen = False
    try:
        while found := _found(given.pid):
            seen = True
            text = "\n\n".join(table(run, time.time()) for run in found)
            print(f"{_HOME}{_CLEAR}{fitting(text)}" if refreshes else text, flush=True)
            if given.once:
                break
            time.sleep(given.seconds)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader, as head, has seen enough: the usual end of a table without end
        return 0
    return 0 if seen else _nothing(given.pid)


def run_where(given: argparse.Namespace) -> int:
    """Print where the ranks are; return the exit code."""
    found = _found(given.pid)
    for run in found:
        print(f"run of process {run.holder}:")
        if run.elsewhere and (text := where_all_are(run)):
            print(text)
            continue
        print(merge({shown.rank: _answer(shown, time.time()) for shown in run.figures}))
        if run.elsewhere:
            print(f"  {run.elsewhere}")
    return 0 if found else _nothing(given.pid)


def _found(pid: int | None) -> list[Run]:
    return [run for run in runs() if pid is None or pid in run.processes]


def _nothing(pid: int | None) -> int:
    if pid is not None and not os.path.exists(f"/proc/{pid}"):
        print(f"distwrap: there is no process {pid} on this node.", file=sys.stderr)
        return 1
    what = "no run of yours is" if pid is None else f"process {pid} belongs to no run of yours"
    print(
        f"distwrap: {what} on this node, or the run has not started yet. A run shows its ranks some seconds after "
        "its start, when their imports are done, and only if it has at least two. Try again then.",
        file=sys.stderr,
    )
    return 1


def _is_late(shown: Shown, now: float) -> bool:
    return now - shown.time > _LATE


def _answer(shown: Shown, now: float) -> Location | str:
    """Return where a rank is, as the answers to SIGQUIT have it."""
    if shown.location is None:
        return LEFT
    location = Location(*shown.location)
    return f"{NO_ANSWER}{seen_at(shown.time, location)}" if _is_late(shown, now) else location


def _place(shown: Shown, now: float) -> str:
    if shown.location is None:
        return LEFT
    location = Location(*shown.location)._replace(step=None)  # which has a column of its own
    return f"{location}{f', {now - shown.time:.0f} s ago' if _is_late(shown, now) else ''}"


def fitting(text: str) -> str:
    """Cut a text to the terminal: what it wrapped would push the rest away."""
    width, height = shutil.get_terminal_size()
    lines = text.splitlines()
    if len(lines) >= height:
        lines = [*lines[: max(1, height - 2)], f"and {len(lines) - max(1, height - 2)} more lines"]
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in lines)


def table(run: Run, now: float) -> str:
    """Return the table of a run's ranks on this node.

    Args:
        run: the run.
        now: the time of day, in seconds.
    """
    rows = [["rank", "pid", "host", "device", "step", "steps/s", "waits", "memory", "shows", "where"]]
    for shown in sorted(run.figures, key=lambda shown: shown.rank):
        rows.append(
            [
                *map(str, (shown.rank, shown.pid, shown.host, shown.device)),
                "-" if shown.step is None else str(shown.step),
                f"{shown.speed:.1f}" if shown.speed >= 1 else f"{shown.speed:.2g}",
                "-" if shown.idle is None else f"{100 * shown.idle:.0f} %",
                as_memory(shown.memory, shown.device_memory),
                shown.bar,
                _place(shown, now),
            ]
        )
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.ljust(width) if name[0] == "where" else cell.rjust(width) for cell, width, name in row).rstrip()
        for row in (list(zip(cells, widths, columns, strict=True)) for cells in zip(*columns, strict=True))
    ]
    return "\n".join([f"run of process {run.holder}", *lines, *filter(None, [run.elsewhere])])
