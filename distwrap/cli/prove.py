"""``distwrap prove``: whether a loop computes the same on several ranks as in one process."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from distwrap.cli.simulate import add_script, arguments_of_script


def add_arguments(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "prove",
        description="Run the first steps of a loop in one process, and on 2, 3 and 4 simulated ranks, with the same "
        "batches, and compare gradients, weights, learning rates, samples, and numbers that are printed or returned. "
        "No device is needed. Exit code 0: equal; 1: something differs; 2: nothing could be proven.",
    )
    parser.add_argument("--ranks", type=_numbers, default=[2, 3, 4], metavar="N,…", help="default: 2,3,4")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps to look at (default: 12)")
    parser.add_argument("--epochs", type=int, default=0, help="look at so many epochs, of --steps batches at most")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="stop 2 ranks after the steps, go on with 3 from what they have saved, and compare",
    )
    parser.add_argument("--real", action="store_true", help="ranks are processes over gloo, rather than simulated")
    parser.add_argument("--batch", type=int, help="size of the batch of all ranks together")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--allow-writes", action="store_true", help="let the loop write outside of the proof's folder")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a test case for each number of ranks")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    add_script(parser)
    parser.set_defaults(run=run)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def run(given: argparse.Namespace) -> int:
    """Prove the script, print what was found, and return 0 if all is equal."""
    from distwrap.errors import OptionError
    from distwrap.prove.proof import prove_program
    from distwrap.prove.world import Program

    if not Path(given.script).is_file():
        raise OptionError(f"there is no script {given.script}")
    options = {name: getattr(given, name) for name in ("allow_writes", "double", "real", "steps", "epochs", "batch")}
    program = Program(str(Path(given.script).resolve()), arguments_of_script(given), **options)
    try:
        proof = prove_program(program, ranks=given.ranks, resume=given.resume)
    except KeyboardInterrupt:  # the frames would be ours: the loop runs in other processes, which have ended by now
        print("distwrap prove: interrupted, so nothing is proven", file=sys.stderr)
        return 130
    if given.junit:
        given.junit.write_text(proof.as_junit())
    print(json.dumps(proof.as_json(), indent=1) if given.json else proof)
    return proof.exit_code
