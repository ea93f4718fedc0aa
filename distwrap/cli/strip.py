"""``python -m distwrap strip``: repairs the keys in a checkpoint's file, and copies the rest as it is."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from distwrap.checkpoint.files import refuse_target
from distwrap.checkpoint.prefixes import read_file, replace_state_dicts, strip_prefixes, write_file
from distwrap.errors import CheckpointError

_SHOWN = 20


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "strip",
        description="Reads a .pt or .safetensors file, memory-mapped, removes wrappers' prefixes from the keys of "
        "every state dict in it, and writes the result; tensors, types and metadata stay. Exit code: 0 where it is "
        "done and fits, 1 where it does not fit, 2 where a file cannot be read or written.",
    )
    parser.add_argument("source", type=Path, metavar="IN", help="the file; it is not changed")
    parser.add_argument("target", type=Path, metavar="OUT", nargs="?", help="where to write; must not exist")
    parser.add_argument(
        "--check", type=Path, metavar="MODEL.pt", help="compare the result with the names and shapes in this file"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the renames as a table, and write nothing")
    parser.add_argument("--force", action="store_true", help="replace OUT where it exists")
    parser.add_argument("--unsafe", action="store_true", help="read pickles that may run code: only if you trust them")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Strip a file's keys, check them and write the result; return the exit code.

    Raises:
        CheckpointError: a file is no checkpoint, or the result not to be written there.
    """
    if given.target is None and not given.dry_run and given.check is None:
        raise CheckpointError("there is no file to write to: give OUT, or --dry-run to only look.")
    if given.target is not None and not given.dry_run:
        refuse_target(given.source, given.target, force=given.force)
    state, metadata = read_file(given.source, unsafe=given.unsafe)
    wanted = None if given.check is None else _model_in(given.check, unsafe=given.unsafe)
    stripped, renames, dicts = strip_prefixes(state, wanted)
    if given.dry_run:
        print(table(renames))
    kept = sum(map(len, dicts)) - len(renames)
    print(f"{given.source}: {len(renames)} keys renamed, {kept} as they were, in {len(dicts)} state dict(s)")
    if not dicts:
        raise CheckpointError(f"{given.source} holds no state dict, which is a dict of names and tensors.")
    problems = [] if wanted is None else list(_differences(dicts, wanted))
    for line in problems[:_SHOWN]:
        print(f"  {line}", file=sys.stderr)
    if problems:
        print(f"distwrap strip: {len(problems)} keys do not fit {given.check}; nothing was written", file=sys.stderr)
        return 1
    if wanted is not None:
        print(f"fits {given.check}: {len(wanted)} keys")
    if given.target is not None and not given.dry_run:
        write_file(stripped, metadata, given.target)
        print(f"written to {given.target}")
    return 0


def table(renames: list[tuple[str, str, Any]]) -> str:
    """Lay the renames out in columns.

    Example:
        >>> print(table([("module.w", "w", torch.zeros(2, 3))]))
        old       new  type     shape
        module.w  w    float32  2 x 3
    """
    lines = [("old", "new", "type", "shape")]
    for old, new, value in renames:
        tensor = isinstance(value, torch.Tensor)
        shape = " x ".join(map(str, value.shape)) or "scalar" if tensor else ""
        lines.append((old, new, str(value.dtype).removeprefix("torch.") if tensor else type(value).__name__, shape))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _model_in(path: Path, *, unsafe: bool) -> dict[str, Any]:
    """Return the one state dict in the file to compare with."""
    found: list[dict[str, Any]] = []
    replace_state_dicts(read_file(path, unsafe=unsafe)[0], lambda state_dict, _: found.append(state_dict))
    if len(found) != 1:
        raise CheckpointError(f"--check {path}: it holds {len(found)} state dicts; give a file with the model's alone.")
    return found[0]


def _differences(dicts: list[dict[str, Any]], wanted: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each key in which the state dict that fits best differs from the wanted one."""
    best = max(dicts, key=lambda found: len(wanted.keys() & found.keys()))
    for name in wanted.keys() - best.keys():
        yield f"missing: {name}"
    for name in best.keys() - wanted.keys():
        yield f"not in the model: {name}"
    for name in wanted.keys() & best.keys():
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in (best[name], wanted[name])]
        if shapes[0] != shapes[1]:
            yield f"shape: {name} is {shapes[0]}, and {shapes[1]} in the model"
