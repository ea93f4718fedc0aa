"""The command line, ``distwrap`` or ``python -m distwrap``: convert, check, doctor and others, each in its own file.

A command's file has ``add_arguments``, which adds its parser, and sets as ``run`` the function that returns the exit
code. A `DistwrapError` or an `OSError` that this function raises is printed here, in one line. The file is imported
when its command is called, so that ``--help`` and ``--version`` need not wait for torch.
"""

import argparse
import importlib
import os
import platform
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any, NamedTuple

from distwrap._version import __version__
from distwrap.errors import DistwrapError
from distwrap.former_names import REMOVED
from distwrap.wording import unknown_name

__all__ = ["COMMANDS", "main"]


class Command(NamedTuple):
    """One command: the file that has it, a line for --help, and examples of its arguments."""

    file: str
    line: str
    examples: tuple[str, ...]


# In the order of --help.
COMMANDS = {
    "convert": Command(
        "convert",
        "convert a training script to distwrap; prints a diff, and what was changed and what was not",
        ("train.py", "train.py --out train_ranks.py --nprocs 2"),
    ),
    "check": Command("check", "find mistakes in a training script that show only on several ranks", ("train.py",)),
    "doctor": Command(
        "doctor",
        "show what distwrap decides on this node and why, then test it with real ranks",
        ("", "--no-test", "--comm --weights 1e8"),
    ),
    "prove": Command(
        "prove",
        "prove that a loop computes the same on several ranks as in one process, or name the first difference",
        ("train.py", "--steps 40 train.py -- --epochs 1"),
    ),
    "simulate": Command(
        "simulate",
        "run a script on several ranks in this process, for a debugger; a deadlock is an error at once",
        ("-n 8 train.py", "-n 4 train.py -- --epochs 1"),
    ),
    "run": Command(
        "run",
        "run a script that calls distwrap's functions on several ranks, without a decorator in it",
        ("-n 4 train.py", "-n 2 --strategy fsdp train.py -- --epochs 1"),
    ),
    "report": Command(
        "report", "print again where the time of a run went, from the file that it wrote", ("times.json",)
    ),
    "where": Command("where", "print the line of the program in which each rank of a run is", ("", "12345")),
    "estimate": Command(
        "estimate", "estimate the memory of a rank under each strategy, before a run", ("train:Net --nprocs 8",)
    ),
    "strip": Command(
        "strip",
        "remove prefixes such as module. and _orig_mod. from a checkpoint's keys",
        ("model.pt plain.pt", "model.pt --dry-run"),
    ),
    "convert-checkpoint": Command(
        "convert_checkpoint",
        "write a checkpoint in another format: .pt, .safetensors, or a folder of parts",
        ("last.pt model.safetensors --key model",),
    ),
}
_EXIT_CODES = (
    "Exit codes: 0 where a command has done what it was asked and all is well; 1 where it has found that something is "
    "wrong; 2 where it could not do its work, because an argument is wrong, a file cannot be read or written, or a "
    "package is not installed."
)
_READER_LEFT = 141  # as a shell has it for a program that SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code.

    Args:
        arguments: by default those of the process.
    """
    try:
        return _run(arguments)
    except BrokenPipeError:
        _throw_output_away()
        return _READER_LEFT
    finally:
        try:
            sys.stdout.flush()  # here, where the error can still be caught
        except BrokenPipeError:
            _throw_output_away()


def _run(arguments: Sequence[str] | None) -> int:
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] not in COMMANDS:
        return _without_command(words)
    given = _parser(words[0]).parse_args(words)
    if "torch" in sys.modules:
        from distwrap.devices.kinds import watch_first_use  # imports torch, which not every command needs

        watch_first_use()
    try:
        return int(given.run(given))
    except BrokenPipeError:  # standard output is no longer read, as after `| head`
        raise
    except (DistwrapError, OSError) as error:
        print(f"distwrap {given.command}: {error}", file=sys.stderr)
        return 2


def _throw_output_away() -> None:
    """Let nothing more be printed: Python writes what is left once more at its end, and would tell of an error then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _without_command(words: list[str]) -> int:
    parser = _top_parser()
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.line)
    parser.add_argument("--version", action="store_true", help="print the versions of distwrap, torch and Python")
    if words and not words[0].startswith("-"):
        if words[0] in REMOVED["command"]:
            parser.error(f"{words[0]!r} is not here: {REMOVED['command'][words[0]]}")
        parser.error(unknown_name("command", words[0], [*COMMANDS, "help"]))
    if parser.parse_args(words).version:
        print(_versions())
    else:
        parser.print_help()
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, with its examples."""
    parser = _top_parser()
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    importlib.import_module(f"distwrap.cli.{COMMANDS[name].file}").add_arguments(commands)
    own: Any = commands.choices[name]
    own.formatter_class = argparse.RawDescriptionHelpFormatter
    own.description = textwrap.fill(own.description or COMMANDS[name].line, 78)
    own.epilog = _shown(f"{parser.prog} {name} {example}" for example in COMMANDS[name].examples)
    return parser


def _top_parser() -> argparse.ArgumentParser:
    prog = _called_as()
    examples = [f"{name} {COMMANDS[name].examples[0]}" for name in ("convert", "check", "doctor")]
    epilog = _shown(f"{prog} {example}" for example in (*examples, "help convert"))
    return argparse.ArgumentParser(
        prog=prog,
        description="Tools around distributed runs. 'help COMMAND' explains one of them.",
        epilog=f"{epilog}\n\n{textwrap.fill(_EXIT_CODES, 78)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _shown(lines: Any) -> str:
    return "\n".join(["examples:", *(f"  {line.rstrip()}" for line in lines)])


def _called_as() -> str:
    """Return the words by which this program was started: ``distwrap``, or ``python -m distwrap``."""
    return "distwrap" if PurePath(sys.argv[0]).stem == "distwrap" else "python -m distwrap"


def _versions() -> str:
    """Return the versions of distwrap, torch and Python, without importing torch."""
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "torch is not installed"
    return f"distwrap {__version__}, {torch}, Python {platform.python_version()}"
