"""``python -m distwrap report``: shows again where the time of a run went, from the file that the run has written."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from distwrap.timing.picture import draw
from distwrap.timing.report import describe


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="where the time of a run went, from its file",
        description="Prints the report of a run again, from the file of @distributed(report='times.json') or "
        "DISTWRAP_REPORT=times.json.",
    )
    parser.add_argument("file", type=Path, help="the file that the run has written")
    parser.add_argument("--plot", metavar="FILE.png", help="draw a bar for each rank (needs matplotlib)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the report, and draw it; return the exit code."""
    try:
        figures = json.loads(given.file.read_text())
        text = describe(figures)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        print(
            f"distwrap report: {given.file} holds no report ({type(error).__name__}: {error}). "
            f"A run with DISTWRAP_REPORT=times.json writes one.",
            file=sys.stderr,
        )
        return 2
    print(text)
    if given.plot:
        try:
            draw(figures, given.plot)
        except ImportError:
            print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
            return 2
        except ValueError as error:  # a suffix of no picture
            print(f"distwrap report: --plot={given.plot}: {error}", file=sys.stderr)
            return 2
    return 0
