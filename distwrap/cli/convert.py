"""``python -m distwrap convert``: turns a script for one process, or with torch's DDP, into one with distwrap."""

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

from distwrap.checks import AT_LEAST_ONE
from distwrap.convert import require_libcst
from distwrap.errors import ConversionError


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        description="Reads a training script, and prints a diff and a list of what it changed, what it did not, and "
        "why. It never runs the script. Exit code: 0 where the result is whole, 1 where TODO lines in it are for you, "
        "or the script cannot be converted, 2 where a script cannot be read or written, or has Accelerate, Fabric or "
        "Horovod, from which you convert by hand.",
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT.py", help="the script; only --write changes it")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--write", action="store_true", help="change the script itself")
    place.add_argument("--out", type=Path, metavar="OUT.py", help="write the converted script here; must not exist")
    parser.add_argument("--strategy", help="the strategy to write into the decorator, for example fsdp")
    parser.add_argument("--nprocs", type=int, help="the number of processes to write into the decorator")
    parser.add_argument(
        "--global-batch", action="store_true", help="keep the script's batch size as that of all ranks together"
    )
    parser.add_argument("--strict", action="store_true", help="refuse a script that would get TODO lines")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Convert a script, print the diff and the list; return the exit code.

    Raises:
        ConversionError: the script cannot be read, uses a library that is converted by hand, or its result cannot be
            written.
    """
    require_libcst()
    from distwrap.convert.conversion import ConversionOptions
    from distwrap.convert.converting import convert
    from distwrap.convert.findings import report
    from distwrap.convert.script import read

    if given.out is not None and given.out.exists():
        raise ConversionError(f"{given.out} exists already: give another name.")
    if given.out is not None and not given.out.parent.is_dir():
        raise ConversionError(f"there is no folder {given.out.parent} to write {given.out.name} into: make it first.")
    script, encoding = read(given.script)
    nprocs = None if given.nprocs is None else AT_LEAST_ONE("--nprocs", given.nprocs)
    converted = convert(script, ConversionOptions(given.strategy, nprocs, given.global_batch))
    sys.stdout.writelines(_diff(script.text, converted.text, str(given.script), str(given.out or given.script)))
    for line in report(converted.notes, given.script.name):
        print(line)
    todo = bool(converted.notes.of("todo"))
    if not converted.is_result or (given.strict and todo):
        print(f"distwrap convert: {given.script} is not changed, for the reasons in the list.", file=sys.stderr)
        return 1
    is_changed = converted.text != script.text
    target = given.out or (given.script if given.write and is_changed else None)
    if target is not None:
        _write(target, converted.text.encode(encoding))
        print(f"written to {target}; on ranks: {converted.command} {target}, or torchrun")
    elif is_changed:
        print(f"nothing is written yet: --write changes {given.script}, --out NEW.py writes beside it")
    return int(todo)


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConversionError(f"{path} cannot be written: {error.strerror}. Choose another place by --out.") from error


def _diff(before: str, after: str, old: str, new: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), old, new)
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
