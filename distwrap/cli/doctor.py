"""``python -m distwrap doctor``: shows what would be decided here and why, and then tests whether it works.

Under srun, mpirun or torchrun every rank runs it, and rank 0 reports for the whole job.
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from typing import Any

from distwrap.checks import AT_LEAST_ONE
from distwrap.cli import doctor_report
from distwrap.cli.facts import look
from distwrap.cli.measure import Measured, measure
from distwrap.decorator import distributed
from distwrap.devices.selection import visible_devices
from distwrap.environments import Placement, detect
from distwrap.environments.variables import variables_set
from distwrap.errors import DistwrapError, OptionError
from distwrap.launch.peer_launchers import NodeSummary

TIMEOUT_SECONDS = 60.0


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        description="Shows what distwrap would decide on this node and why, then starts ranks and measures their "
        "exchange. Exit code: 0 where it works, 1 where it does not, 2 where an argument is wrong.",
    )
    parser.add_argument("--nprocs", type=int, help="ranks to start on this node; by default one for each device, or 2")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time and bandwidth by size (needs matplotlib)")
    parser.add_argument(
        "--comm", action="store_true", help="measure the algorithms of exchange (comm=), and recommend one"
    )
    parser.add_argument(
        "--weights", type=float, default=1e7, help="for --comm: number of weights of the model; by default 1e7"
    )
    parser.add_argument(
        "--step-ms", type=float, help="for --comm: milliseconds of a step on one rank; by default measured"
    )
    parser.add_argument("--no-test", action="store_true", help="only show what would be decided, and start nothing")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Collect the facts, test on real ranks and print the report; return the exit code."""
    began = time.monotonic()
    is_rank = _is_rank()
    nprocs = None if given.nprocs is None else AT_LEAST_ONE("--nprocs", given.nprocs)
    if nprocs is None and not is_rank:
        nprocs = visible_devices().count or 2
    facts = look(nprocs)
    rank = facts.rank
    problems, remarks, measured = list(facts.problems), list(facts.remarks), None
    if not given.no_test and not problems:
        try:
            measured = _test(nprocs, given)
        except Exception as error:  # noqa: BLE001 - whatever went wrong is what the user wants to know
            problems.append(f"the real test failed: {type(error).__name__}: {error}")
    if isinstance(measured, NodeSummary):
        print(f"distwrap doctor: {measured}", file=sys.stderr)
        return 0
    if measured is not None:
        facts = measured.facts[0] if is_rank else facts
        problems += [text for each in measured.facts for text in each.problems if text not in problems]
        remarks += doctor_report.disagreements(measured.facts)
    if rank == 0:
        found = doctor_report.DoctorReport(facts, measured, problems, remarks, time.monotonic() - began)
        print(found.json() if given.json else found.text())
        if given.plot and measured is not None and measured.all_reduces:
            try:
                doctor_report.plot(measured, given.plot)
            except ImportError:
                raise OptionError("--plot needs matplotlib: pip install matplotlib") from None
    return 1 if problems else 0


def _is_rank() -> bool:
    """Return whether a launcher has started this process as a rank."""
    with suppress(DistwrapError):
        found = detect(os.environ)
        return isinstance(found, Placement) and found.source != "single"
    return False


def _test(nprocs: int | None, given: argparse.Namespace) -> Measured | NodeSummary:
    """Measure on real ranks, without the line at the start."""
    options: dict[str, Any] = {"timeout": TIMEOUT_SECONDS} | ({} if nprocs is None else {"nprocs": nprocs})
    step = None if given.step_ms is None else given.step_ms / 1000
    with variables_set({"DISTWRAP_QUIET": "1"}):
        result: Measured | NodeSummary = distributed(measure).options(**options)(
            (int(given.weights), step) if given.comm else None
        )
    return result
