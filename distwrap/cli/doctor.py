"""``python -m distwrap doctor``: what would be decided here and why, and then whether it works.

Under srun, mpirun or torchrun every rank runs it, and rank 0 reports for the whole job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from distwrap.cli import report
from distwrap.cli.facts import Facts, look
from distwrap.cli.measure import Measured, measure
from distwrap.decorator import distributed
from distwrap.environments import Placement, detect
from distwrap.errors import DistwrapError
from distwrap.launch.nodes import NodeSummary

TIMEOUT_SECONDS = 60.0


def add_arguments(commands: Any) -> None:
    """Describe the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="what would be decided here and why, then a real test",
        description="Shows what distwrap would decide here and why, then starts ranks and measures their exchange. "
        "Exit code: 0 where it works, 1 where it does not.",
    )
    parser.add_argument("--nprocs", type=int, help="ranks to start on this machine; by default 2, or one a device")
    parser.add_argument("--json", action="store_true", help="for scripts: one JSON object on standard output")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time and bandwidth by size (needs matplotlib)")
    parser.add_argument("--comm", action="store_true", help="measure the algorithms of exchange, and recommend one")
    parser.add_argument("--weights", type=float, default=1e7, help="of the model, for --comm; by default ten million")
    parser.add_argument("--step-ms", type=float, help="of one step on one rank, for --comm; by default measured")
    parser.add_argument("--no-test", action="store_true", help="only look, start nothing")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Look, test, report; return the exit code."""
    began = time.monotonic()
    started_by_others = _is_a_rank()
    nprocs = given.nprocs if given.nprocs is not None else None if started_by_others else _default_nprocs()
    facts = look(nprocs)
    speaks = not started_by_others or facts.rank == 0
    problems, measured = list(facts.problems), None
    if not given.no_test and not problems:
        try:
            measured = _test(nprocs, given)
        except Exception as error:  # noqa: BLE001 - whatever went wrong is what the user wants to know
            problems.append(f"the real test failed: {type(error).__name__}: {error}")
    if isinstance(measured, NodeSummary):
        print(f"distwrap doctor: {measured}", file=sys.stderr)
        return 0
    remarks = list(facts.remarks)
    if measured is not None:
        facts = measured.facts[0] if started_by_others else facts
        problems += [text for each in measured.facts for text in each.problems if text not in problems]
        remarks += report.disagreements(measured.facts)
    if speaks:
        _print(given, facts, measured, problems, remarks, time.monotonic() - began)
    return 1 if problems else 0


def _is_a_rank() -> bool:
    try:
        found = detect(os.environ)
    except DistwrapError:
        return False
    return isinstance(found, Placement) and found.source != "single"


def _default_nprocs() -> int:
    from distwrap.devices.selection import visible_devices

    return max(2, visible_devices().count) if visible_devices().kind == "cpu" else visible_devices().count


def _test(nprocs: int | None, given: argparse.Namespace) -> Measured | NodeSummary:
    quiet = os.environ.get("DISTWRAP_QUIET")
    os.environ["DISTWRAP_QUIET"] = "1"
    try:
        options: dict[str, Any] = {"timeout": TIMEOUT_SECONDS} | ({} if nprocs is None else {"nprocs": nprocs})
        asked = None
        if given.comm:
            asked = (int(given.weights), None if given.step_ms is None else given.step_ms / 1000)
        return distributed(measure).options(**options)(asked)
    finally:
        os.environ.pop("DISTWRAP_QUIET") if quiet is None else os.environ.update(DISTWRAP_QUIET=quiet)


def _print(
    given: argparse.Namespace,
    facts: Facts,
    measured: Measured | None,
    problems: list[str],
    remarks: list[str],
    seconds: float,
) -> None:
    if given.json:
        found = {"problems": problems, "remarks": remarks, "seconds": round(seconds, 3), "here": facts.plain()}
        print(json.dumps(found | (measured.plain() if measured is not None else {}), indent=1))
    else:
        parts = [report.of_facts(facts)]
        if measured is not None:
            parts.append(report.of_measured(measured, seconds))
            if measured.advice is not None:
                parts.append(report.of_advice(measured.advice))
        print("\n\n".join([*parts, report.of_problems(problems, remarks)]))
    if given.plot and measured is not None and measured.exchanges:
        try:
            report.plot(measured, given.plot)
        except ImportError:
            print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
