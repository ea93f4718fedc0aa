"""``python -m distwrap convert-checkpoint``: writes a checkpoint in another format, tensor by tensor."""

import argparse
from pathlib import Path
from typing import Any

from distwrap.checkpoint.convert import Stored
from distwrap.checkpoint.files import refuse_target
from distwrap.checkpoint.formats import CheckpointIO, choose
from distwrap.checkpoint.prefixes import strip_prefixes
from distwrap.checkpoint.safetensors_format import SUFFIX, SafetensorsIO
from distwrap.errors import CheckpointError, DistwrapError
from distwrap.wording import first_line

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")  # of a file of torch's
FORMATS = ("file", "safetensors", "sharded")


def add_arguments(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert-checkpoint",
        description="Reads a .pt or .safetensors file, a folder of .safetensors with an index, or a folder of torch's "
        "distributed checkpoint, of distwrap, FSDP or torch alone, and writes it in another of these formats, tensor "
        "by tensor. Exit code: 0 where it is done, 2 where it cannot be.",
    )
    parser.add_argument("source", type=Path, metavar="IN", help="the file or folder; it is not changed")
    parser.add_argument("target", type=Path, metavar="OUT", help="the file or folder to write; must not exist")
    parser.add_argument("--format", choices=FORMATS, help="format of OUT; by default its suffix decides")
    parser.add_argument("--key", help="convert only what is under this key, as 'model'; nested keys are joined by dots")
    parser.add_argument("--strip", action="store_true", help="remove prefixes such as module. and _orig_mod.")
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest size of a file in a safetensors folder; by default 5GB",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT where it exists")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Convert a checkpoint; return the exit code.

    Raises:
        CheckpointError: there is none in IN, or OUT cannot hold it.
    """
    try:
        _convert(given)
    except (DistwrapError, OSError):
        raise
    except Exception as error:  # whatever torch says of a file that is damaged
        raise CheckpointError(f"cannot convert {given.source}: {first_line(error)}") from error
    return 0


def _convert(given: argparse.Namespace) -> None:
    io = _format_of(given)
    refuse_target(given.source, given.target, force=given.force)
    stored = Stored(given.source)
    for key in given.key.split(".") if given.key else ():
        if not isinstance(stored.state, dict) or key not in stored.state:
            raise CheckpointError(f"{given.source} has no {key!r}. It has: {_keys(stored.state)}.")
        stored.state = stored.state[key]
    renames = 0
    if given.strip:
        stored.state, renamed, _ = strip_prefixes(stored.state)
        renames = len(renamed)
    if isinstance(io, SafetensorsIO) and (nested := _nested(stored.state)):
        raise CheckpointError(
            f"{SUFFIX} holds the tensors of one model, and {given.source} has {nested} too. Give the model's key by "
            f"--key, of: {_keys(stored.state)}."
        )
    stored.write(given.target, io)
    print(f"{given.source} written to {given.target}" + (f", {renames} keys renamed" if given.strip else ""))


def _format_of(given: argparse.Namespace) -> CheckpointIO:
    name = given.format or ("safetensors" if given.target.suffix == SUFFIX else "file" if given.target.suffix else None)
    if given.format is None and given.target.suffix not in ("", SUFFIX, *SUFFIXES):
        raise CheckpointError(
            f"{given.target} ends in {given.target.suffix}, which is no known format: use {SUFFIX} or "
            f"{', '.join(SUFFIXES)}, or say --format."
        )
    if name is None:
        raise CheckpointError(f"{given.target} has no suffix: say --format {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if name == "safetensors":
        return SafetensorsIO(max_shard_size=given.max_shard_size)
    return choose(name, given.target)


def _nested(state: Any) -> str:
    """Return what is no tensor in a state, in words; empty where it is a dict of tensors."""
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    found = [f"{type(value).__name__} {key!r}" for key, value in state.items() if not hasattr(value, "dtype")]
    return ", ".join(found[:3])


def _keys(state: Any) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    return ", ".join(map(repr, list(state)[:12]))
