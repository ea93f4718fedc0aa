"""``python -m distwrap check``: reads training scripts, and lists what goes wrong on several ranks."""

import argparse
import sys
from pathlib import Path
from typing import Any

from distwrap.convert import require_libcst
from distwrap.errors import DistwrapError


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        description="Reads scripts, never runs them, and lists each finding with its line, why it matters, and what to "
        "write. A comment '# distwrap: ignore' keeps a line out. Exit code: 0 for no findings, 1 for some, 2 where a "
        "script cannot be read.",
    )
    parser.add_argument("scripts", type=Path, nargs="+", metavar="SCRIPT.py", help="the scripts")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Check scripts, and print the findings; return the exit code."""
    require_libcst()
    from distwrap.convert.checking import check, is_for_ranks
    from distwrap.convert.script import read

    count, all_read = 0, True
    for path in given.scripts:
        try:
            script, _ = read(path)
        except DistwrapError as error:  # which hides no finding in the others
            print(f"distwrap check: {error}", file=sys.stderr)
            all_read = False
            continue
        findings = list(check(script))
        count += len(findings)
        for finding in findings:
            print(finding.text(str(path)))
        if not findings and not is_for_ranks(script):
            print(f"{path}: uses neither DistributedDataParallel nor distwrap, so there is nothing to check")
    print(f"{count} finding{'s' * (count != 1)}")
    return int(count > 0) if all_read else 2
