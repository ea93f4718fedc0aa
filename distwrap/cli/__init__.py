"""The command line: ``python -m distwrap convert``, ``check``, ``doctor`` and others, each in a file of its own.

A command's file has ``add_arguments``, which adds its parser, and sets as ``run`` what returns its exit code. What it
raises of `DistwrapError` and `OSError` is said here, in a line.
"""

import argparse
import sys
from collections.abc import Sequence

from distwrap.cli import check, convert, convert_checkpoint, doctor, estimate, report, strip, top
from distwrap.errors import DistwrapError

__all__ = ["main"]

_COMMANDS = (convert, check, doctor, report, top, estimate, strip, convert_checkpoint)  # in the order of --help
_EXIT_CODES = (
    "Exit codes: 0 where a command has done what it was asked and all is well; 1 where it has found that something is "
    "not; 2 where it could not look or write, because what it was given is wrong, cannot be read, or is not installed."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code.

    Args:
        arguments: by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m distwrap", description="Tools around distributed runs.", epilog=_EXIT_CODES
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.add_arguments(commands)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    try:
        return int(given.run(given))
    except (DistwrapError, OSError) as error:
        print(f"distwrap {given.command}: {error}", file=sys.stderr)
        return 2
