"""``python -m distwrap report``: shows again where the time of a run went, from the file that the run has written."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from distwrap.timing.picture import draw
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
    parser.add_argument("--plot", metavar="FILE.png", help="also draw it, with a bar for each rank (needs matplotlib)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the report, and draw it; return the exit code."""
    try:
        figures = json.loads(given.file.read_text())
        text = describe(figures)
    except OSError as error:
        return _failed(f"{given.file} cannot be read: {error.strerror}. {_HOW}")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return _failed(f"{given.file} is not a report. {_HOW}")
    print(text)
    if not figures:
        return 1
    if given.plot:
        try:
            draw(figures, given.plot)
        except ImportError:
            return _failed("--plot needs matplotlib: pip install matplotlib")
        except OSError as error:
            return _failed(f"{given.plot} cannot be written: {error.strerror}. Name a file in a folder that exists.")
        except ValueError as error:
            return _failed(f"{given.plot} cannot be drawn: {error}. Give a name that ends in .png.")
    return 0


def _failed(why: str) -> int:
    print(f"distwrap report: {why}", file=sys.stderr)
    return 2
