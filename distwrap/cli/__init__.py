"""The command line: ``python -m distwrap convert``, ``check``, ``doctor`` and others, each in a file of its own."""

import argparse
from collections.abc import Sequence

from distwrap.cli import check, convert, convert_checkpoint, doctor, estimate, strip

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code.

    Args:
        arguments: by default those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m distwrap", description="Tools around distributed runs.")
    commands = parser.add_subparsers(metavar="COMMAND")
    convert.add_arguments(commands)
    check.add_arguments(commands)
    doctor.add_arguments(commands)
    estimate.add_arguments(commands)
    strip.add_arguments(commands)
    convert_checkpoint.add_arguments(commands)
    given = parser.parse_args(arguments)
    if "run" not in given:
        parser.print_help()
        return 0
    return int(given.run(given))
