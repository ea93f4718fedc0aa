"""The command line: ``python -m distwrap doctor``, ``estimate`` and ``strip``."""

import argparse
from collections.abc import Sequence

from distwrap.cli import doctor, estimate, strip

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code.

    Args:
        arguments: by default those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m distwrap", description="Tools around distributed runs.")
    commands = parser.add_subparsers(metavar="COMMAND")
    doctor.add_arguments(commands)
    estimate.add_arguments(commands)
    strip.add_arguments(commands)
    given = parser.parse_args(arguments)
    if "run" not in given:
        parser.print_help()
        return 0
    return int(given.run(given))
