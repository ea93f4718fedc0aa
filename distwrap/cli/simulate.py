"""``distwrap simulate``: a script on ranks that are threads of one process, which take turns."""

import argparse
import sys
from typing import Any

from distwrap.checks import AT_LEAST_ONE


def add_arguments(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "simulate",
        description="Run a script as torchrun would, but on ranks that are threads of this process, of which one runs "
        "at a time: a breakpoint() stops all, a deadlock is an error at once, and one run is one order. No device is "
        "needed: a script that names GPUs runs on what is there.",
    )
    parser.add_argument("-n", "--nprocs", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument("--schedule", type=int, metavar="SEED", help="draw another order of the ranks' turns")
    add_script(parser)
    parser.set_defaults(run=run)


def add_script(parser: argparse.ArgumentParser, kind: str = ", with distwrap or nothing but torch.distributed") -> None:
    """Add a script and its own arguments, which come last."""
    parser.add_argument("script", help=f"a Python file{kind}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own")


def arguments_of_script(given: argparse.Namespace) -> list[str]:
    """Return the script's own arguments, also where ``--`` stands before them."""
    words: list[str] = given.arguments
    return words[1:] if words[:1] == ["--"] else words


def run(given: argparse.Namespace) -> int:
    """Run the script, and return 1 if a rank has failed, or none can go on."""
    from distwrap.testing.simulation.simulation import failure_of

    ranks, words = AT_LEAST_ONE("-n", given.nprocs), arguments_of_script(given)
    failure = failure_of(given.script, ranks, words, schedule=given.schedule)
    if failure:
        print(f"distwrap: {failure}", file=sys.stderr)
    return int(bool(failure))
