"""``python -m distwrap report``: shows again where the time of a run went, from the file that the run has written."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from distwrap.timing.report import describe

_HOW = "A run with @distributed(report='times.json') or DISTWRAP_REPORT=times.json writes a report to times.json."


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        description="Prints the report of a run again, from the file of @distributed(report='times.json') or "
        "DISTWRAP_REPORT=times.json.",
    )
    parser.add_argument("file", type=Path, help="the file that the run wrote")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the report; return the exit code."""
    try:
        figures = json.loads(given.file.read_text())
        text = describe(figures)
    except OSError as error:
        return _failed(f"{given.file} cannot be read: {error.strerror}. {_HOW}")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return _failed(f"{given.file} is not a report. {_HOW}")
    print(text)
    return 0 if figures else 1


def _failed(why: str) -> int:
    print(f"distwrap report: {why}", file=sys.stderr)
    return 2
