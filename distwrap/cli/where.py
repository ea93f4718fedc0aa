"""``python -m distwrap where``: the line of the program in which each rank of a run on this node is."""

import argparse
import os
import sys
import time
from typing import Any

from distwrap.supervision.locations import LEFT, NO_ANSWER, Location, merge, seen_at
from distwrap.supervision.runs import Shown, runs, where_all_are

_LATE = 5.0  # seconds after which a rank should have shown itself again


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "where",
        description="Prints the line of the program in which each rank is, as the run itself does when its caller "
        "gets SIGQUIT. Under Slurm: srun --overlap --jobid JOB python -m distwrap where. Exit code: 1 where nothing "
        "runs.",
    )
    parser.add_argument(
        "pid",
        nargs="?",
        type=int,
        help="process id of the program that runs, or of one of its ranks; by default all of your runs",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print where the ranks are; return the exit code."""
    found = [each for each in runs() if given.pid is None or given.pid in each.processes]
    for each in found:
        print(f"run of process {each.holder}:")
        if each.elsewhere and (text := where_all_are(each)):
            print(text)
            continue
        print(merge({shown.rank: _answer(shown, time.time()) for shown in each.shown}))
        if each.elsewhere:
            print(f"  {each.elsewhere}")
    return 0 if found else _nothing(given.pid)


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


def _answer(shown: Shown, now: float) -> Location | str:
    """Return where a rank is, as the answers to SIGQUIT have it."""
    if shown.location is None:
        return LEFT
    location = Location(*shown.location)
    return f"{NO_ANSWER}{seen_at(shown.time, location)}" if now - shown.time > _LATE else location
